"""Threads of Comfy-Org/ComfyUI about core's models on cards like those of this pack's users, and what happens now."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thread:
    """One symptom.

    Args:
        numbers: of the threads. reported: the symptom. now: what happens with this pack. test: the one that shows it.
    """

    numbers: str
    reported: str
    now: str
    test: str


FIT, CLASSES, DOCTOR = "test_core_fit.py", "test_core_classes.py", "test_doctor.py"
THREADS = (
    Thread(
        "#9184, #9077, #9773, #13166, #7020, #8573", "black with SageAttention",
        "values are kept within what its fp16 sums hold", f"{FIT}::test_other_kernels_are_given_what_they_bear",
    ),
    Thread("#15338", "LTX forced to fp32", "safe fp16", f"{FIT}::test_safe_fp16_is_near_fp32_where_plain_fp16_is_not"),
    Thread(
        "#12321, #12176", "Z-Image finetunes black in fp16", "safe fp16",
        f"{FIT}::test_safe_fp16_is_near_fp32_where_plain_fp16_is_not",
    ),
    Thread("#15262", "MiniMax H3 on V100: residual of 1e7", "safe fp16, up to 1e12 too",
           f"{CLASSES}::test_a_residual_of_1e7_and_of_1e12"),
    Thread("#15452", "black on the second decode", "decoded again in fp32",
           f"{CLASSES}::test_a_second_decode_that_is_black"),
    Thread("#16337, #16437", "noise and false colour on a 9070 XT",
           "a window is held against the CPU, again and again within 3 % of the time; then decoded in fp32",
           f"{CLASSES}::test_a_second_decode_of_noise_or_false_colour"),
    Thread("#16490", "a schedule leaks into later runs", "Doctor names the schedule that is not as loaded",
           f"{CLASSES}::test_a_schedule_that_leaks"),
    Thread(
        "#16160", "text encoder without kernels runs out of memory", "Fit CLIP `bounded`",
        f"{FIT}::test_text_encoders_in_safe_fp16_and_with_bounded_attention",
    ),
    Thread(
        "#11264, #9128", "hundreds of GiB of scores where torch has no kernel", "exact in chunks",
        f"{FIT}::test_bytes_of_scores_stay_within_the_budget",
    ),
    Thread("#10681", "Apple's attention is wrong for views", "a probe sees it; exact in chunks",
           f"{CLASSES}::test_an_attention_that_is_wrong_for_views"),
    Thread("#14743", "random black on a B580", "Doctor computes the step again and says so",
           f"{CLASSES}::test_nan_that_comes_once"),
    Thread("#11626, #6859, #8785", "fp8 files on Macs", "held as bytes, or as fp16 without scales",
           f"{CLASSES}::test_fp8_weights_on_a_mac"),
    Thread(
        "#5341, #16299", "decodes that always tile, or tile before memory is freed",
        "whole first, then with all other models freed; tiles only after that",
        f"{FIT}::test_a_decode_that_runs_out_of_memory_goes_to_smaller_tiles",
    ),
)  # fmt: skip
