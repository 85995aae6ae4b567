"""Integer codes for dtypes, optimizers and table columns in calls of the compiled loops."""

from paramserver.types import INT8_BLOCK

BLOCK = 2048
"""Elements per block."""

# Codes of a gradient: elements of a dtype, or an encoded partition (docs/codecs.md), decoded block by block.
# MEAN_CODE is for `step` only: the mean of several gradients, computed block by block.
F32_CODE, F64_CODE, F16_CODE, BF16_CODE, INT8_CODE, TOPK_CODE, MEAN_CODE = range(7)

INT8_ROW = 4 + INT8_BLOCK
"""Bytes of a scale and its elements in int8."""

# Optimizer codes.  ADAM covers adamw, whose decay is a factor of w.
SGD, MOMENTUM, NESTEROV, ADAGRAD, RMSPROP, ADAM, FTRL, SUM = range(8)

# Columns of the step table; A, B and C depend on the optimizer (`calls._row`).
SCALE, CLIP, DECAY, A, B, C = range(6)
COLUMNS = 6
