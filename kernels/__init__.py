"""Fused operations of video transformers and VAEs: each with its torch reference, its registration and its launch.

Every public function takes tensors where they lie (any strides, chunks of larger tensors, zero sizes), reckons in fp32
and rounds once. ``form`` chooses: ``auto`` launches on a GPU that Triton serves and runs the reference elsewhere,
``triton`` raises :class:`library.KernelError` where nothing can be launched, ``reference`` is plain torch.
``<function>_reference`` is the same without ``form``; fed fp64 it is the truth that tests measure errors against.

=================  ============================================================================================
``terms``          ``Norm(kind, eps, weight, bias)``, ``Modulation(scale, shift, split)``,
                   ``Gate(values, tanh, norm_eps, split)``, ``Pair(q, k, q_weight, k_weight)``, ``Tables(cos, sin)``,
                   ``GroupNorm(groups, eps, weight, bias, per_frame)``; constants ``RMS``, ``LAYER``
``norm``           ``normalized(x, norm, modulation, out_dtype, form)``
``residual``       ``gated_residual(x, branch, gate, form)``;
                   ``residual_norm(x, branch, gate, norm, modulation, out_dtype, form)`` -> (residual, normed)
``rope``           ``qk_norm_rope(pair, tables, eps, text, out_dtype, form)`` -> (q, k)
``activation``     ``swiglu(x, out_dtype, form)``
``product``        ``linear_gelu(x, weight, bias, form)``
``group_norm``     ``group_norm_silu_pad(x, norm, pad, silu, layout, form)``;
                   ``rms_silu_pad(x, norm, modulation, pad, silu, layout, form)``
``library``        ``launches(x, form)``, ``reason_against(device, dtype)``, ``FORMS``, ``KernelError``
``self_tests``         ``self_tests(device, form, only)``: each operation once against fp64; for reports
=================  ============================================================================================

Inference only: no operation has a backward.
"""
