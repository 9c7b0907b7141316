"""Fused operations of video transformers and VAEs: each with its torch reference, its registration and its launch.
Every public function takes tensors where they lie (any strides, zero sizes), computes in fp32 and rounds once. ``form``
chooses: ``auto`` launches on a GPU that Triton serves and runs the reference elsewhere, ``triton`` raises
:class:`library.KernelError` where nothing can be launched, ``reference`` is plain torch. ``<function>_reference`` is
the same without ``form``; fed fp64 it is the truth that tests measure errors against. Inference only."""
