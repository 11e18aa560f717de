"""Triton's kernels on a CPU, where TRITON_INTERPRET=1 is set before Triton is imported."""


def let_triton_interpret() -> None:
    """Gives Triton's interpreter what it lacks for Liger's kernels: float arguments and CUDA's library functions."""
    import numpy as np
    from liger_kernel.ops import geglu, layer_norm, rms_norm
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(arg):
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), language.float32)
            return language.tensor(handle, language.float32)
        return convert(arg)

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = layer_norm.rsqrt = lambda x: 1.0 / language.sqrt(x)
    geglu.tanh = lambda x: 2.0 * language.sigmoid(2.0 * x) - 1.0
