"""Which operators compute in float16, beyond what their schemas allow: the reasons are in `conx.graph.fp16`."""

__all__ = ["CLIPPED", "MOVES", "NARROW", "STAGES", "STATISTICS", "TYPED", "WIDE", "WRAPS"]

# Stay float32: what they compute can leave float16's range, or sums up many values.
WIDE = {
    "Acosh", "Atanh", "Cosh", "CumSum", "Exp", "GridSample", "Log", "LogSoftmax", "LpNormalization", "Mod", "Pow",
    "Range", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Reciprocal", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Sinh",
    "Softplus", "Sqrt", "Tan", "Cos", "Sin", "DFT", "STFT",
}  # fmt: skip
# With a large weight they compute in float16 whatever they are fed: this is where its speed is.
NARROW = {
    "Attention", "BatchNormalization", "Conv", "ConvTranspose", "DeformConv", "Einsum", "EmbedLayerNormalization",
    "FusedConv", "FusedGemm", "FusedMatMul", "GRU", "Gather", "Gemm", "GroupNorm", "GroupNormalization",
    "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "MultiHeadAttention", "PackedAttention", "RNN",
    "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
# What only moves values: of a weight it gives a weight.
MOVES = {
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip
# A constant beyond float16's range is a bound or a mask here, and may be clipped. Not where it is added: of a row that
# is masked throughout, float32 leaves nothing but the mask.
CLIPPED = {"Where", "Max", "Min", "Clip", "Pad"}
# Whose outputs' type is said by an attribute: it stays.
TYPED = {"Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "Multinomial", "Bernoulli", "OneHot", "BitCast"}
# What puts values into sequences and optionals: of these, schemas do not say which type they hold.
WRAPS = {"Optional", "OptionalGetElement", "SequenceConstruct", "SequenceInsert", "SplitToSequence"}
# How far a normalization in parts has come, from the operator and how far its inputs had. What it makes of float16
# values float16 holds again; and its factors have to be float16 then, for onnxruntime fuses them with what came in.
STAGES = {
    ("Add", "mean", "constant"): "mean",
    ("Add", "constant", "mean"): "mean",
    ("Sqrt", "mean"): "deviation",
    ("Reciprocal", "deviation"): "inverse",
    ("Div", "constant", "deviation"): "inverse",
    ("Sub", "half", "mean"): "centered",
    ("Div", "half", "deviation"): "normalized",
    ("Div", "centered", "deviation"): "normalized",
    ("Mul", "half", "inverse"): "normalized",
    ("Mul", "inverse", "half"): "normalized",
    ("Mul", "centered", "inverse"): "normalized",
    ("Mul", "inverse", "centered"): "normalized",
}
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}  # small variances count
