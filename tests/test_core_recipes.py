"""The catalogue of distillations for core's samplers: names that give a recipe, and graphs that differ from it."""

from pathlib import Path
from typing import Any

import pytest
from anygpu.host.recipes import ROWS, advice, recipe_of
from anygpu.pipelines.files.evidence import published
from anygpu.pipelines.registry import FAMILIES

Prompt = dict[str, dict[str, Any]]
WAN2GP = "deepbeepmeep/Wan2GP 8681e9f7"
LTX_LORA = "ltx-2.3-22b-distilled-lora-384.safetensors"
PDD = "MiniMax-H3-FL2VA-Acc-8Step.safetensors"
LIGHT = "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors"
NAMED = {  # beginning of the source and steps -> names in public listings
    ("ModelTC/LightX2V f8aee98b configs/distill", 4): f"""{LIGHT} wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise
        Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32 Wan21_I2V_14B_lightx2v_cfg_step_distill_lora_rank64
        lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16 lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16
        lightx2v_14B_T2V_cfg_step_distill_lora_adaptive_rank_quantile_0.15_bf16 wan2.1_i2v_480p_lightx2v_4step
        wan2.1_t2v_14b_lora_rank64_lightx2v_4step wan2.1_i2v_720p_scaled_fp8_e4m3_lightx2v_4step_comfyui
        wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022 wan2.2_i2v_A14b_low_noise_int8_lightx2v_4step
        Wan2.2-Lightning_T2V-v1.1-A14B-4steps-lora_HIGH_fp16 Wan2.2_I2V_A14B_HIGH_4steps_lora_rank64_Seko_V1_forKJ
        Wan22_A14B_T2V_LOW_Lightning_4steps_lora_250928_rank64_fp16
        Wan2.2_I2V_A14B_HIGH_lightx2v_MoE_distill_lora_rank_64_bf16 wan22_lightning
        Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors""",
    ("templates video_wan_vace_14B", 8): """Wan21_CausVid_14B_T2V_lora_rank32 Wan21_CausVid_14B_T2V_lora_rank32_v2
        Wan21_CausVid_bidirect2_T2V_1_3B_lora_rank32""",
    ("W2G docs/LORAS.md", 0): "Wan21_AccVid_T2V_14B_lora_rank32_fp16 Wan21_AccVid_I2V_480P_14B",
    ("W2G docs/LORAS.md, p", 10): """Wan14BT2VFusioniX_fp16 Wan2.1_I2V_14B_FusionX_LoRA
        Phantom_Wan_14B_FusionX_LoRA Wan2.1_T2V_14B_FusionX_LoRA""",
    ("W2G profiles/wan_2_2_5B", 3): """Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16
        Wan2_2-TI2V-5B-FastWanFullAttn_bf16 FastWan2.1-T2V-1.3B-Diffusers FastWan2.2-TI2V-5B-FullAttn-Diffusers""",
    ("quanhaol", 4): "Wan22_TI2V_5B_Turbo_lora_rank_64_fp16 Wan2.2-TI2V-5B-Turbo_fp16",
    ("template video_wan_animate2", 10): "wan_animate_2_distill_int8_convrot wan2.2_animate2_14B_distilled_mbf16",
    ("template image_chrono", 8): "chronoedit_distill_lora",
    ("template video_causal", 4): "causal_forcing-framewise",
    ("Lightricks/LTX-2 model card", 8): """ltx-2-19b-distilled ltx-2-19b-distilled-fp8 ltx-2.3-22b-distilled-fp8
        ltx-2.5-22b-distilled-transformer-comfy-int8-convrot ltx-2.3-22b-distilled-Q4_K_M_light.gguf
        ltx-2.3-22b-distilled-1.1_diffusion_model_bf16 ltx-2-19b-distilled_Q8_0.gguf
        ltx-2-19b-distilled-lora-384 ltx-2.3-22b-distilled-lora-384-1.1 ltx-2.5-22b-distilled-lora-450_bf16
        ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16 sulphur_distil_lora""",
    ("Lightricks/LTX-Video", 7): "ltxv-13b-0.9.8-distilled ltxv-13b-0.9.7-distilled-lora128 ltxv-2b-0.9.8-distilled",
    ("lightx2v/Minimax-h3-Turbo", 8): """minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16
        minimax_h3_lightx2v_fl2v_turbo_8step_alpha8_v1.0_bf16 minimax_h3_ref2v_turbo_8step_v0.1_comfyui_bf16""",
    ("ModelTC/LightX2V f8aee98b README", 4): """minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16
        minimax_h3_lightx2v_fl2v_turbo_4step_alpha128_v1.0_768p_bf16
        minimax_h3_fl2v_turbo_4step_v1.1_768p_bf16""",
    ("CZMartin22", 3): "TaoMate-H3-3step-ComfyUI taomate_h3_3step_comfy minimax_h3_taomate_3step",
    ("Phr00t", 4): "wan2.2-rapid-mega-aio-v10 wan2.2-i2v-rapid-aio-v10-nsfw-Q6_K.gguf WAN22_AIO_Rapid_i2v",
    ("NVlabs", 4): """Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83_bf16 Wan_2_1_T2V_1_3B_480p_rCM_lora
        TurboWan2.1-T2V-14B-720P TurboWan2.2-I2V-A14B-high-720P-quant rCM_Wan2.1_T2V""",
    ("Comfy-Org/workflow_templates video_fastvideo_fasth3_t2v", 8): """FastVideo-FastH3-8-Step-V2
        fastvideo_fasth3_8step_v2_pruned_int8_convrot fastvideo_fasth3_8step_v2_pruned_bf16""",
    ("hao-ai-lab/FastVideo", 4): """minimax_h3_fastvideo_vsa_datafree_1300step_4step_int8_convrot
        FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree FastVideo-Minimax-FastH3-Preview-v0.2 FastH3_VSA_DataFree
        FastH3-Dense-4-step-v1-LoRA-ComfyUI-pruned fasth3_vsa_4-steps-v5""",
    ("tutututututu", 8): """tutu-t8-minimax-h3-av-20to8-nfe-lora-step000100-bf16-comfyui
        Tutu-MiniMax-H3-AudioVideo-20to8-NFE-LoRA""",
    ("vllm-project/vllm-omni", 4): """minimax_h3_t2va_flashgen_4step_v1.0_768p_bf16
        minimax_h3_4step_lora_flashgen_v1.0_768p_fl2va_pruned_avg_rank_13_bf16 h3_FlashGen_4step_fl2va
        minimax_h3_flashgen_4step_v1.0_768p_fl2va_pruned_rank64_comfy""",
    ("Phr00t/LTX2", 8): """ltx2-phr00tmerge-sfw-v5 ltx2-phr00tmerge-nsfw-v62-Q5_K_M.gguf sulphur_distil_bf16
        ltx-2-19b-phr00tmerge-nsfw-v3 sulphur_distil_fp8mixed sulphur_distil_nvfp4 sulphur_distil-Q4_K_M.gguf
        Sulphur-2-base-distil-Q4_K_M.gguf JoyAI-Echo_diffusion_model_bf16""",
    ("W2G profiles/minimax_h3", 4): """minimax_h3_ref2v_turbo_4step_v0.1_comfyui_bf16
        minimax_h3_turbo_4step_ema_ckpt850 minimax_h3_fl2va_4step_lora minimax_h3_turbo_4step_ckpt600_ema_V4
        minimax_h3_lightx2v_turbo_4step_v0.1_comfy_int8convrot minimax_h3_larryvrh_v4_step600_ema
        minimax_h3_joyfox_fl2va_4step_lora minimax_h3_fl2v_turbo_4step_v0.1_768p_sla_bf16
        minimax_h3_fl2v_turbo_4step_v0.1_comfyui_alpha8""",
    ("alibaba-pai", 8): f"{PDD} MiniMax-H3-Ref2VA-Acc-8Step MiniMax-H3-FL2VA-Acc-8Step_pruned_comfy",
    ("kandinskylab", 0): "kandinsky5lite_t2v_nocfg_10s kandinsky5lite_t2v_nocfg_5s",
    ("W2G defaults/k5", 16): "kandinsky5lite_t2v_distilled16steps_10s_bf16",
}  # fmt: skip
PLAIN = """wan2.2_i2v_high_noise_14B_fp8_scaled wan2.2_ti2v_5B_fp16 wan2.1_t2v_14B_bf16 wan2.1_14B_SCAIL_2_fp16
    ltx-2-19b-dev ltx-2.3-22b-dev-fp8 ltx2-squish ltx-2.3-22b-ic-lora-union-control-ref0.5
    ltx-2-19b-lora-camera-control-dolly-left ltx-video-2b-v0.9.5 hunyuanvideo1.5_720p_t2v_fp16
    hunyuan_video_t2v_720p_bf16 wan_animate_2_int8_convrot minimax_h3_fl2va_pruned_int8_convrot
    MiniMax-H3-Ref2VA_bf16 z_image_turbo_bf16 krea2_turbo_int8_convrot Qwen-Image-Lightning-4steps-V1.0
    Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16 flux1-schnell-fp8 wan_style_24_steps seko_the_cat watch3d_turbo
    FusionXL_style wan_rank32_1004steps minimax_style_lora wan2.1_SCAIL_2_DPO_lora_bf16 minimax_music3_dit_fp16
    Qwen-Image-Edit-2509-Light-Migration sd_xl_turbo_1.0_fp16 hunyuan3d-dit-v2-mv-turbo_fp16 acestep_v1.5_turbo
    pixel_art_style_z_image_turbo hidream_i1_fast_fp8 Wan2.1-Fun-14B-InP-MPS HighSpeedDynamics
    Wan14B_RealismBoost_T2V DetailEnhancerV1 Wan21_T2V_14B_MoviiGen_lora_rank32_fp16 removal_timestep_alpha-2-1740
    ltx-2.3-id-lora-talkvid-3k wan_cinematic_lora_4500_steps style_epoch40_steps2000 hy15_480p_t2v_fp8_e4m3_lightx2v
    WanLightningStyle lightning_strike_wan_lora fast_wanderer fusion_x_ray accvidal dance_4_steps_wan_lora
    ltx2_distillery_scene h3_turbo_car_lora ltx-2-19b-embeddings_connector_distill_bf16 Wan2.1-360_epoch20
    ltx2-embeddings-connector-distill SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16 Wan21_PusaV1_LoRA_14B_rank512
    WanAnimate_relight_lora_fp16 Wan2.2-Fun-A14B-InP-high-noise-MPS wenzhiyu_woman_wan22_5b scail2-dpo-lora_new
    FramePackI2V_lightx2v_lora Hunyuan_Self_Forcing_lora ltxv-13b-0.9.8-non-distilled
    minimax_h3_hybrid_fl2va_ref2va_b15-49 MiniMax-H3_FL2VA-INT8-ConvRot-HQ 10Eros_v1.4_bf16_model LTX2_SS_Motion_7K
    sulphur_dev_bf16 sulphur_lora_rank_768 10Eros_v1 minimax_h3_vdn_default_lora_bf16 fast_h3_car_lora flashgenius_style
    tutu_ballet_h3_lora joyai_echolocation flashgen_anime
    LTX-2-19b-IC-LoRA-Canny-Control hunyuanimage2.1_distilled_bf16 wan22-fun-reward wan22_4step_dance
    kiss_ltx2_lora LTX2.3-IC-LORA-Dual-Character MiniMax-H3_Ref2VA-LoRA-CrossView-Warp_v1"""


def graph(lora: str = LIGHT, strength: float = 1.0, steps: int = 20, cfg: float = 5.0, **more: Any) -> Prompt:
    """Loader, LoRA, shift, Fit, KSampler; ``more`` inputs of the sampler, or ``shift``."""
    shift = {"shift": more.pop("shift", 5.0)}
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "1": ("UNETLoader", {"unet_name": "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"}),
        "2": ("LoraLoaderModelOnly", {"lora_name": lora, "strength_model": strength, "model": ["1", 0]}),
        "3": ("ModelSamplingSD3", {**shift, "model": ["2", 0]}),
        "4": ("AnyGPUFit", {"model": ["3", 0], "precision": "auto"}),
        "5": ("KSampler", {"steps": steps, "cfg": cfg, "model": ["4", 0], "latent_image": ["9", 0], **more}),
    }
    return {node: {"class_type": kind, "inputs": inputs} for node, (kind, inputs) in parts.items()}


def custom(lora: str, sigmas: dict[str, Any], guider: str = "CFGGuider", **given: Any) -> Prompt:
    """The same model through SamplerCustomAdvanced."""
    prompt = graph(lora)
    prompt["6"] = {"class_type": guider, "inputs": {"model": ["4", 0], **given}}
    prompt["7"] = {"class_type": "ManualSigmas" if "sigmas" in sigmas else "BasicScheduler", "inputs": sigmas}
    inputs = {"guider": ["6", 0], "sigmas": ["7", 0], "sampler": ["8", 0], "latent_image": ["9", 0]}
    return prompt | {"5": {"class_type": "SamplerCustomAdvanced", "inputs": inputs}}


def line(prompt: Prompt, fit: str = "") -> str:
    return " | ".join(map(str, advice(prompt, fit).values()))


def test_names_in_public_listings_give_their_recipe_and_others_none() -> None:
    for (source, steps), names in NAMED.items():
        for name in names.split():
            row = recipe_of(Path(name if name.endswith((".gguf", ".safetensors")) else f"{name}.safetensors"))
            assert row is not None and row["source"].startswith(source.replace("W2G", WAN2GP)), (name, row)
            assert row.get("steps", [0])[0] == steps, (name, row)
    for name in PLAIN.split():
        assert recipe_of(Path(f"{name}.safetensors")) is None, name


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("hunyuan_video", "FastVideo", "fast-hunyuan-video-t2v-720p-Q4_K_M.gguf"),
        ("hunyuan_video", "FastVideo", "hunyuan_video_fast_720_fp8_e4m3fn.safetensors"),
        ("hunyuan_video", "AccVideo", "accvideo_hunyuan_video_720_quanto_int8.safetensors"),
        ("hunyuan_video", "AccVideo", "accvideo-t2v-5-steps_fp8_e4m3fn.safetensors"),
        ("hunyuan_video_15", "lightx2v", "hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16.safetensors"),
        ("hunyuan_video_15", "lightx2v", "hy1.5_t2v_480p_lightx2v_4step.safetensors"),
        ("hunyuan_video_15", "lightx2v LoRA", "Hunyuan_video_1_5_LigthX2V_dpm_rank32.safetensors"),
        ("hunyuan_video_15", "step distilled LoRA", "Hunyuan_video_1_5_i2v_step_distilled_dpm_rank32.safetensors"),
        ("hunyuan_video_15", "few steps", "hunyuanvideo1.5_480p_i2v_step_distilled_fp16.safetensors"),
        ("hunyuan_video_15", "super-resolution 1440", "hunyuanvideo1.5_1080p_sr_distilled_fp16.safetensors"),
        ("hunyuan_video_15", "super-resolution 960", "hunyuanvideo1.5_720p_sr_distilled_fp16.safetensors"),
        ("mochi", "FastMochi", "FastMochi.safetensors"),
        ("ltx", "distilled 13B", "ltxv-13b-0.9.8-distilled.safetensors"),
        ("ltx", "distilled_0.9.6", "ltxv-2b-0.9.6-distilled-04-25.safetensors"),
    ],
)
def test_a_model_of_ours_has_the_same_recipe_in_cores_sampler(family: str, key: str, name: str) -> None:
    row, own = recipe_of(Path(name)), FAMILIES[family].published.recipes[key]
    assert row is not None and row["steps"][0] == own.steps
    assert row["cfg"][0] == (own.guidance[0].cfg if own.guidance else 1)
    assert not own.shift or row["shift"][0] == own.shift


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (graph(), "20 steps, cfg 5"),
        (graph(steps=4, cfg=1, shift=5), ""),
        (graph(steps=4, cfg=1, shift=12.5), "shift 12.5"),
        (graph(steps=4, cfg=1, scheduler="karras"), "karras"),
        (graph(steps=1, cfg=1), "1 steps"),
        (graph(steps=1, cfg=1, denoise=0.3), ""),
        (graph(strength=0.3), ""),  # its recipe is not in force
        (graph("Wan\\Wan2.2-I2V-A14B-4steps-lora-rank64-Seko-V1\\high_noise_model.safetensors"), "20 steps, cfg 5"),
        (graph("my_style.safetensors"), ""),
        (graph(steps=8, cfg=1, start_at_step=4, end_at_step=10000), ""),
        (graph(steps=20, cfg=1, start_at_step=10, end_at_step=10000), "20 steps"),
        (graph(steps=["8", 0], cfg=["8", 0]), ""),  # computed: not known
        (custom(LTX_LORA, {"sigmas": "1.0, 0.975, 0.9, 0.7, 0.0"}, cfg=1), "4 steps"),
        (custom(LTX_LORA, {"sigmas": "0.85, 0.725, 0.4219, 0.0"}, cfg=1), ""),
        (custom(LTX_LORA, {"steps": 8, "denoise": 1.0}, video_cfg=3.0), "cfg 3"),
        (custom(PDD, {"steps": 20, "denoise": 1.0}, "BasicGuider"), "20 steps, shift 5"),
    ],
)  # fmt: skip
def test_a_graph_is_told_what_differs_from_its_distillation(prompt: Prompt, found: str) -> None:
    said = line(prompt)
    assert (f"in a graph with {found}; expected " in said) if found else not said, said
    assert line(prompt, "4") == said and not line(prompt, "1")
    del prompt["4"]
    assert not advice(prompt)


def test_the_line_says_found_expected_and_what_to_do() -> None:
    prompt = graph()
    prompt["15"] = {**prompt["5"]}  # the other expert, which differs alike
    assert line(prompt) == (
        f"{Path(LIGHT).stem} in a graph with 20 steps, cfg 5; expected 4 steps, cfg 1, shift 5, "
        "euler, simple. Set these around KSampler. Source: ModelTC/LightX2V f8aee98b configs/distill; templates "
        "video_wan2_2_14B."
    )
    assert "output heads need a ComfyUI newer" in line(graph(PDD))


def test_what_switches_and_other_packs_hand_on_is_followed() -> None:
    prompt = graph(lora="my_style.safetensors", steps=["20", 0])
    prompt["20"] = {
        "class_type": "ComfySwitchNode",
        "inputs": {"switch": ["21", 0], "on_true": ["22", 0], "on_false": 4},
    }
    prompt["21"] = {"class_type": "PrimitiveBoolean", "inputs": {"value": True}}
    prompt["22"] = {"class_type": "PrimitiveInt", "inputs": {"value": 30}}
    prompt["1"]["inputs"]["lora_1"] = {"on": True, "lora": LIGHT, "strength": 1.0}
    assert "30 steps, cfg 5" in line(prompt)
    prompt["21"]["inputs"]["value"] = False
    assert "with cfg 5;" in line(prompt)
    prompt["21"] = {"class_type": "ComfySwitchNode", "inputs": {"switch": ["21", 0], "on_true": ["21", 0]}}
    prompt["5"]["inputs"] |= {"scheduler": 1, "cfg": 10**400, "sigmas": [None], "sampler": ["5", 0], "guider": ["5", 0]}
    assert not line(prompt)


def test_each_row_has_a_source_and_ranges_around_what_is_usual() -> None:
    keys = {"named", "source", "steps", "cfg", "shift", "sampler", "scheduler", "strength", "note"}
    for row in published(ROWS):
        assert row["source"] and row.keys() <= keys
        for usual, least, most in (row[name] for name in ("steps", "cfg", "shift") if name in row):
            assert least <= usual <= most, row


def test_a_folder_s_name_counts_beside_the_file_s_and_a_node_that_nothing_reaches_may_have_no_inputs():
    assert recipe_of(Path("lightx2v/qwen_image_fp8_e4m3fn.safetensors")) is None
    assert recipe_of(Path("Wan2.2_Lightning/my_style.safetensors")) is None
    assert recipe_of(Path("Wan2.2_Lightning/wan2.2_t2v_A14b_high_noise_lora_rank64.safetensors"))
    assert advice({"7": {"class_type": "PreviewImage"}}, "3") == advice(None, "3") == {}
