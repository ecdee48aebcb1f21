"""From a model to a .conx file."""
