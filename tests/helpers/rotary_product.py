"""The mark of tests that count operations: older releases of transformers make rotary angles by a matrix product."""

import pytest
import transformers
from packaging.version import Version

no_rotary_product = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this transformers makes rotary angles by a matrix product, which only PyTorch's counter counts",
)
