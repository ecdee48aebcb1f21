"""Measurements of conx against its peers: real models, real inputs, and how both are measured."""
