"""Which variant a published file is: what it says of itself, then the names around it, each named in the decision."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import published
import pytest
import tiny
import torch
from anygpu.compat.checkpoints.headers import entries_and_notes
from anygpu.pipelines.families.hunyuan_video import pipeline as hunyuan_video
from anygpu.pipelines.families.ltx import pipeline as ltx
from anygpu.pipelines.files import formats
from anygpu.pipelines.files.evidence import (
    Evidence,
    cautions_by_name,
    cautions_of,
    evidence_of,
    names_around,
    names_of_file,
    recipe_named,
)
from anygpu.pipelines.files.formats import StoredModel, config_of, contents
from anygpu.pipelines.files.part import PartFiles
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.registry import FAMILIES
from anygpu.pipelines.requests import LoadRequest

CACHE = "x/hub/models--tencent--HunyuanVideo-1.5/"
STEPS = [1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("models/diffusers/LTX-Video-0.9.5", ("LTX-Video-0.9.5",)),
        ("models/diffusers/LTX-Video-0.9.8-13B-distilled/transformer", ("LTX-Video-0.9.8-13B-distilled",)),
        (CACHE + "snapshots/1f0a/transformer/720p_i2v", ("720p_i2v", "HunyuanVideo-1.5")),
        ("HunyuanVideo-1.5/transformer/720p_i2v/diffusion_pytorch_model.safetensors", ("720p_i2v", "HunyuanVideo-1.5")),
        ("models/diffusion_models/ltxv-13b-0.9.8-distilled-fp8.safetensors", ("ltxv-13b-0.9.8-distilled-fp8",)),
        ("/home/distilled/models/unet/dev/model.gguf", ("dev",)),
    ],
)  # fmt: skip
def test_names_that_every_model_has_say_nothing(path: str, names: tuple[str, ...]) -> None:
    assert names_around(Path(path)) == names


def test_a_folder_of_many_files_says_something_of_those_alone_whose_own_names_say_nothing() -> None:
    folder = Path("loras/FastHunyuan_LoRA")
    for own in ("pytorch_lora_weights", "high_noise_model", "hunyuan_video_720_rank64_bf16", "adapter_model"):
        assert names_of_file(folder / f"{own}.safetensors")[-1] == folder.name
    for own in ("my_style", "yoda_e60_512"):
        assert names_of_file(folder / f"{own}.safetensors", {"modelspec.title": "Yoda"}) == ("Yoda", own)


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[str], StoredModel], Callable[..., Any]]:
    """From a model in ``shapes.json`` to what its file holds, and which configurations that fits, each found once."""
    compared: dict[tuple[str, int], Any] = {}
    own = formats._misfit

    @cache
    def content_of(model: str) -> StoredModel:
        file = tmp_path_factory.mktemp("stored") / "diffusion_pytorch_model.safetensors"
        return contents(published.sparse(file, published.shapes(model)))[0]

    def misfit(row: Mapping[str, Any], content: StoredModel) -> Any:
        key = row["name"], id(content.entries)
        if key not in compared:
            compared[key] = own(row, content)
        return compared[key]

    return content_of, misfit


@pytest.fixture
def stored(stored_once: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StoredModel]:
    content_of, misfit = stored_once
    monkeypatch.setattr(formats, "_misfit", misfit)
    return content_of


@pytest.mark.parametrize(
    ("folder", "model", "name", "why"),
    [
        ("480p_i2v_step_distilled", "hunyuan_video_15 meanflow", "480p i2v, few steps", ""),
        ("720p_i2v", "hunyuan_video_15", "720p i2v", "the name '720p_i2v' says so"),
        *(
            (name, "hunyuan_video_15 sr", f"super-resolution to {end}", f"the name {name!r} says so")
            for name, end in (
                ("720p_sr_distilled", "720p"),
                ("1080p_sr_distilled", "1080p"),
                ("720p_to_1080p_sr_distilled", "1080p"),
            )
        ),
        *(
            (name, "hunyuan_video_15", "480p i2v", f"the name {name!r} says so")
            for name in ("480p_i2v_step7200", "480p_i2v_1720steps", "480p_i2v_20260720", "480p_i2v_like_720p")
        ),
        ("480p_t2v_distilled", "hunyuan_video_15", "480p t2v distilled", "the name '480p_t2v_distilled' says so"),
        ("480p_t2v", "hunyuan_video_15", "480p t2v", "the name '480p_t2v' says so"),
        ("HY1.5-720p-i2v/480p_t2v", "hunyuan_video_15", "480p t2v", "the name '480p_t2v' says so"),
        ("hunyuan_i2v/t2v_720", "hunyuan_video", "text to video", "the name 't2v_720' says so"),
        *(
            (f"{folder}/{name}", "hunyuan_video_15", row, f"the name '{name}/{folder}' says so")
            for folder, name, row in (
                ("720p", "hunyuan_1.5_i2v", "720p i2v"),
                ("HunyuanVideo-1.5_I2V_480p-GGUF", "hunyuanvideo1.5_cfg_distilled-Q5", "480p i2v distilled"),
            )
        ),
        ("480p_i2v/hy15_720p_t2v", "hunyuan_video_15", "720p t2v", "the name 'hy15_720p_t2v' says so"),
        ("hy15_480p_t2v_undistilled", "hunyuan_video_15", "480p t2v", "the name 'hy15_480p_t2v_undistilled' says so"),
        *(
            (name, "hunyuan_video_15", row, f"the name {name!r} says so, but for {lacks}, which is assumed")
            for name, row, lacks in (
                ("HunyuanVideo-1.5-720p-FP8", "720p t2v", "t2v"),
                ("hunyuanvideo-1.5-robotwin15-i2v-lora", "480p i2v", "480"),
                ("hunyuan_video_1.5_distill", "480p t2v distilled", "480 and t2v"),
            )
        ),
    ],
)
def test_tencents_own_folders_say_which_model_they_hold(
    stored: Callable[[str], StoredModel], tmp_path: Path, folder: str, model: str, name: str, why: str
) -> None:
    """A file under the name that every file there has, in the folder that says what it is."""
    file = tmp_path / "models" / "HunyuanVideo-1.5" / "transformer" / folder / "diffusion_pytorch_model.safetensors"
    content = replace(stored(model), path=file)
    found = config_of(content)
    assert (found.name, found.why) == (name, why)
    known = config_of(content, known="720p i2v distilled")
    assert (known.name, known.why) == (("720p i2v distilled", "") if model == "hunyuan_video_15" else (name, why))


@pytest.mark.parametrize(
    ("name", "config", "variant", "why"),
    [
        ("my favourite", {"allowed_inference_steps": STEPS}, "distilled", "its file says that it was trained for 8"),
        ("ltxv-2b-0.9.6-distilled-04-25", {"scheduler": {}}, "distilled_0.9.6", "'ltxv-2b-0.9.6-distilled-04-25' says"),
        ("LTXV_2B_096_distilled-q8_0", None, "distilled_0.9.6", "'LTXV_2B_096_distilled-q8_0' says"),
        ("ltxv_096_q8", {"allowed_inference_steps": STEPS}, "distilled_0.9.6", "'ltxv_096_q8' says"),
        ("LTX-Video-0.9.6/distilled-q8_0", None, "distilled_0.9.6", "'LTX-Video-0.9.6/distilled-q8_0' says"),
        ("ltxv-13b-distilled", None, "distilled", "'ltxv-13b-distilled' says so, and no name its version: 0.9.8 is"),
        ("distilled/ltxv-13b-0.9.8-dev", None, "dev", "does not say 'distilled'"),
        ("ltxv-13b-0.9.7-distilled-fp8", {"scheduler": {}}, "distilled", "the name"),
        ("ltxv-13b-0.9.8-dev", {"scheduler": {"sampler": "x"}}, "dev", "its file names no noise levels"),
        ("ltxv-13b-0.9.8-dev", None, "dev", "does not say 'distilled'"),
        ("ltxv-13b-0.9.8-non-distilled", None, "dev", "does not say 'distilled'"),
        ("undistilled-ltxv-2b-0.9.8", None, "dev", "does not say 'distilled'"),
    ],
)
def test_the_metadata_comes_before_the_names(tmp_path: Path, name: str, config: object, variant: str, why: str) -> None:
    notes = None if config is None else {"config": config}
    file = published.sparse(tmp_path / "models" / f"{name}.safetensors", {"x": (1,)}, metadata=notes)
    found, said = ltx.guess_variant(evidence_of(file, {}))
    of_folder = evidence_of(file.parent, {}, entries_and_notes(file)[0])
    assert found == variant and why in said and of_folder.notes == evidence_of(file, {}).notes


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("ltxv-2b-0.9.8-distilled.safetensors", None),  # beside the parts, as in Lightricks' own repository
        ("ltxv-2b-0.9.8-distilled.safetensors", b"version https://git-lfs.github.com/spec/v1"),
        ("transformer/a.fp16.safetensors", b"version https://git-lfs.github.com/spec/v1"),
        ("vae/a.fp16.safetensors", b"version https://git-lfs.github.com/spec/v1"),
    ],
)
def test_a_file_that_is_not_read_says_nothing_of_the_model_beside_it(
    tiny_folder: Path, tmp_path: Path, place: str, content: bytes | None
) -> None:
    folder = Path(shutil.copytree(tiny.build("ltx", tiny_folder), tmp_path / "mine"))
    published.sparse(folder / place, {"x": (1,)}, metadata={"config": {"allowed_inference_steps": STEPS}})
    if content is not None:
        (folder / place).write_bytes(content)
    assert load(LoadRequest(folder, device="cpu")).variant == "dev"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("SkyReels_Text_to_Video_FP8", "skyreels"),
        ("skyreels-hunyuan-T2V-Q8_0", "skyreels"),
        ("SkyReels/hunyuan_video_t2v_720p_bf16", "skyreels"),
        ("SkyReels/hunyuan_video_720_cfgdistill_bf16", "hunyuan_video"),
        ("HunYuan_Text_to_Video_CFG_Distill", "hunyuan_video"),
    ],
)
def test_a_renamed_skyreels_is_known_among_tencents_own(name: str, variant: str) -> None:
    assert hunyuan_video.guess_variant(Evidence(names=names_around(Path(name))))[0] == variant


@pytest.mark.parametrize(
    ("sampler", "pipeline"), [("LinearQuadratic", "LTXConditionPipeline"), ("Uniform", "LTXPipeline")]
)
def test_a_files_own_scheduler_says_its_pipeline(sampler: str, pipeline: str) -> None:
    notes = {"config": json.dumps({"scheduler": {"sampler": sampler}})}
    found = ltx.settings_in(Evidence(notes))
    assert found["index"]["_class_name"] == {"Uniform": "LTXPipeline"}.get(sampler, "LTXConditionPipeline")
    assert found["scheduler"].get("use_dynamic_shifting", True) == (sampler == "Uniform")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"scheduler": 3}', '"x"', "[" * 5000])
def test_metadata_of_another_kind_says_nothing(text: str) -> None:
    found = Evidence({"config": text})
    assert found.note("config", "scheduler", "sampler") is None and ltx.settings_in(found) == {}


@pytest.mark.parametrize(
    ("name", "dtype", "scaled", "said"),
    [
        ("ltxv-13b-0.9.7-dev-fp8", "F8_E4M3", False, True),
        ("ltxv-13b-0.9.7-dev-fp8", "F8_E4M3", True, False),
        ("ltxv-13b-0.9.7-dev-fp8", "BF16", False, False),
        ("ltxv-13b-0.9.7-distilled-fp8", "F8_E4M3", False, False),
        ("ltxv-13b-0.9.8-dev-fp8", "F8_E4M3", False, False),
        ("ltxv-13b-0.9.7-dev_fp8_e4m3fn", "F8_E4M3", False, False),
    ],
)
def test_the_one_file_whose_first_upload_was_turned_comes_with_a_caution(
    tmp_path: Path, name: str, dtype: str, scaled: bool, said: bool
) -> None:
    """Since 14 May 2025 Lightricks' fp8 is plain, and its Q8 kernels turn the weights themselves."""
    tensors: dict[str, tuple[int, ...]] = {"transformer_blocks.0.attn1.to_q.weight": (4, 4)}
    file = published.sparse(tmp_path / "models" / f"{name}.safetensors", tensors, dtype)
    entries = entries_and_notes(file)[0]
    if scaled:
        entries = {key: replace(entry, codec="scaled") for key, entry in entries.items()}
    part = PartFiles("transformer", "diffusers", "X", file, {}, entries, torch.float32)
    told = cautions_of(FAMILIES["ltx"], part, evidence_of(file, {}).names)
    assert [decision.alarming for decision in told] == [True] * said


PUBLISHED_NAMES = {  # family: {recipe that a name gives away, "caution", or "" for neither: names in public listings}
    "hunyuan_video": {
        "FastVideo": """hunyuan_video_FastVideo_720_fp8_e4m3fn fast-hunyuan-video-t2v-720p-Q4_K_M FastHunyuan
            FastHunyuan-diffusers FastHunyuanVideo hunyuan_video_FastVideo_LoRA-fp8 hyvideo_FastVideo_LoRA-fp8
            fasthunyuan-q8_0
            fast_hunyuan_video_720_quanto_int8 fastvideo-lora-hunyuan FastVideo_LoRA_hyvid fastvideo_lora_rank64
            FastHunyuan-LoRA fastvideo_hunyuan_t2v_q4_k_m fastvideo_t2v_720p FastHunyuan-gguf
            fast-hunyuan-video-t2v-720p-BF16 fastvideo_hunyuan_video_lora FAST_HunYuan_Text_to_Video_FP8
            FAST_HunYuan_Text_to_Video_GGUF_BF16 FAST_HunYuan_Text_to_Video_GGUF_Q8 FAST_HunYuan_Text_to_Video_GGUF_Q6_K
            fast-hunyuan-video-t2v-720p-Q5_K_M fast-hunyuan-video-t2v-720p-Q6_K fast-hunyuan-video-t2v-720p-Q8_0
            hunyuan_video_fast_720_fp8_e4m3fn""",
        "AccVideo": """accvideo_hunyuan_5step_bf16 AccVideo accvid_5_steps_lora
            hunyuan_video_accvid_5_steps_lora_rank16_fp8
            hunyuan_video_accvid_t2v-5-steps_Q4_K_M accvideo-t2v-5-steps-Q8_0 Hunyuan_AccVid_lora_rank32
            accvid_t2v_hunyuan_5step_fp8 acc_video_hunyuan AccVideo-T2V-5-STEPS
            accvideo_hunyuan_video_720_quanto_int8 hunyuan_video_accvid_5_steps_lora_rank16_fp8_e4m3fn
            accvideo-t2v-5-steps_fp8_e4m3fn""",
        "caution": """hunyuan_video_custom_720p_fp8_scaled hunyuan_video_custom_720_bf16 HunyuanCustom
            hunyuan_custom_720p_fp8_scaled hunyuan_video_custom_audio_720_bf16 hunyuan_video_custom_edit_720_bf16
            hunyuan_video_avatar_720_bf16 HunyuanVideo-Avatar
            HunyuanVideo_dashtoon_keyframe_lora_converted_comfy_bf16 HunyuanVideo_dashtoon_keyframe_lora_converted_bf16
            hunyuan-video-keyframe-control-lora img2vid img2vid544p Hunyuan-GameCraft-1.0 HunyuanWorld-Voyager
            HYCustom_720p_bf16 hyvideo_custom_edit_720 HY-Avatar-fp8 hunyuanvideo_canny_control_lora
            hunyuan_depth_control_lora_v1 HunyuanVideo_pose_control_lora hunyuan_first_last_frame_lora
            hunyuan_video_inpaint_lora HY-WorldPlay hunyuan_video_turbo_lora hunyuan_lcm_lora_rank64
            hunyuan_video_distilled_8steps hyvid_4_step_lora hunyuan-video-fast hunyuan_dmd2_lora hunyuan_removal_lora
            HunyuanPortrait HunyuanVideo-Foley hunyuanvideo_foley hunyuanvideo_foley_xl hunyuanvideo_foley_fp8_e4m3fn
            phantom phantom_14B hunyuan_video_avatar_edit_720_bf16 hunyuan_video_custom_720p-Q4_K_M
            hunyuan_video_custom_720_quanto_bf16_int8 hunyuan_video_custom_audio_720_quanto_bf16_int8
            hunyuan_video_custom_edit_720_quanto_bf16_int8 hunyuan_video_avatar_720_quanto_bf16_int8
            hunyuan_softedge_lora hyvid_v2v_lora hunyuan_inbetween_lora hunyuan_frame_interpolation_lora
            image2vid-960x544
            hunyuan_colorize_lora hunyuan_object_remover_v1 hunyuan_densepose_lora hunyuan_motion_transfer
            hunyuan_optical_flow_lora hunyuan_relight_lora hunyuan_video_edit_lora HunyuanVideo-HOMA
            HunyuanVideo-Keyframe-Control-Lora hunyuan-video-img2vid-lora dashtoon-keyframe hunyuan_video_upscaler_v1
            hunyuan_lightning_lora hyv_speedup_lora hunyuan_face_swap_v1 hunyuan_step_distill_4step
            Hunyuan_Video_Flash_4steps img2vid960x544 img2vid512x320 hunyuan-video-t2v-causvid Hunyuan-Fast-T2V-fp8
            hunyuan_video_hyper_lora hunyuan_pcm_lora subject_driven style_transfer coloring fill sr depth_pred
            DRA-Ctrl DCM_HY gamecraft_models mp_rank_00_model_states_distill HunyuanCustom-gguf hunyuan_avatar
            hunyuan_video_t2v-fp8-scaled-fast hunyuan_i2v_fast_fp8 HunyuanVideo_dashtoon_lora hunyuanVideo_6steps
            hunyuan_video_t2v_720p_lightx2v_4step hunyuan_video_t2v_cfg_step_distill hunyuan_flf2v_lora hunyuan_tcd_lora
            hunyuan_rCM_lora
            HunyuanVideo_lightning_8step_fp8 hunyuan_video_pcm_720 hunyuanvideo_i2v_leapfusion_merged""",
        "": """hunyuan_video_720_cfgdistill_fp8_e4m3fn hunyuan_video_720_cfgdistill_bf16 HunyuanVideo HunyuanVideo-I2V
            hunyuan_video_t2v_720p_bf16 hunyuan_video_I2V_fp8_e4m3fn hunyuan_video_image_to_video_720p_bf16
            hunyuan-video-t2v-720p-Q4_K_M hunyuan_video_v2_replace_image_to_video_720p_bf16
            skyreels_hunyuan_t2v_bf16 skyreels-hunyuan-I2V-Q5_K_M hunyuan_video_720_bf16 hunyuan_video_i2v_720_bf16
            hunyuan-video-i2v-720p-Q8_0 hyvid_I2V_lora_embrace hyvid_I2V_lora_hair_growth
            hyvid_camera_control_lora hyvid_style_lora_2000_steps hyvid_navi_avatar_lora my_custom_hyvid_lora
            hunyuan_video_guidance_distilled depth_of_field_hunyuan_lora hunyuan_fast_motion_lora
            hunyuan_video_720_quanto_int8 hunyuan_video_i2v_720_bf16v2 hunyuan_video_i2v_720_quanto_int8v2
            hunyuan_video_I2V-Q4_K_S hunyuan_video_I2V-Q8_0 hunyuan_video_I2V_720_fixed_bf16
            hunyuan_video_I2V_720_fixed_fp8_e4m3fn hunyuan_video_720_fp8_e4m3fn EmiliaClarke_V1_ep20
            Nicole_Kidman_Huny_converted annie_epoch100 belleHunyuan elsa_e70_512 gamora_epoch30 gr00cket_e50_512
            inara_epoch100 luna_lovegood_e60_512 mantisEpoch50 wickEpoch50 yoda_e60_512 HyVid_egirl_lora_theaidoctor
            edge_of_reality_ep30_25200stp_lora_theaidoctor Latex_Hunyuan_Ver_1.0 crossTop swimsuit
            Influencer_Poses_PolyPhaze10 SECRET_SAUCE_HERO_V2.1 makima_hunyuan
            125226-e20-csetiarcane_style_v3-s6660 csetiarcane-nfjinx-v1-6000 HunyuanVideo-LoRA-Arcane_Jinx-v1 AnimeShots
            this_is_fine_meme_hunyuan_video_lora modal_labs_dissolve hunyuan_erase_lora_cat clothing_removal_hunyuan
            phantom_thief_lora firelight_hunyuan amv_edit_style_hyvid skeleton_dance_hunyuan sketch_style_hunyuan
            lineart_style_hyvid Full_Nelson_Position_Ver_0.5 interview_talking_head_hunyuan FastVideo
            Hunyuan-lora-finetuning-Black-Myth-Wukong Hunyuan-Black-Myth-Wukong-lora-weight hunyuan-video-720-fp8
            mp_rank_00_model_states_fp8 hunyuan-video-t2v-720p-Q4_0 hunyuan-video-i2v-720p-Q5_K_M HunyuanVideo-gguf
            Walking_Animation_Hunyuan_Video Orbit_Cam_Character_Hunyuan_Video Move_Enhancer_V3_20 fallout_nv_lora
            Emma_Watson_Hunyuan_video_Lora Influencer_Poses SkyReels-V1-Hunyuan-T2V lightning_strike_hunyuan
            HunyuanVideo-lora-AnimeShots hunyuan_boreal-hl studio_ghibli_hv_v03 hunyuan_video_t2v_720p_nf4
            HunYuan_Text_to_Video HunYuan_Text_to_Video_CFG_Distill HunYuan_Text_to_Video_CFG_Distill_FP8_Scaled
            HunYuan_Image_to_Video HunYuan_Image_to_Video_FP8_Scaled HunYuan_Image_to_Video_GGUF_Q8
            HunYuan_Image_to_Video_GGUF_Q6_K HunYuan_Image_to_Video_GGUF_Q4_K_S SkyReels_Text_to_Video
            SkyReels_Text_to_Video_FP8 SkyReels_Image_to_Video SkyReels_Image_to_Video_FP8 hunyuan_video_I2V_fp8_e5m2
            SkyReels_Image_to_Video_GGUF_Q8 SkyReels_Image_to_Video_GGUF_Q6_K SkyReels_Image_to_Video_GGUF_Q5_K_M
            SkyReels_Image_to_Video_GGUF_Q4_K_S skyreels_hunyuan_t2v_fp8_e4m3fn skyreels_hunyuan_i2v_fp8_e4m3fn
            skyreels-hunyuan-I2V-Q8_0 skyreels-hunyuan-I2V-Q6_K skyreels-hunyuan-I2V-Q4_K_S hunyuan_video_I2V-Q6_K
            hunyuan-video-t2v-720p-q8_0 hunyuan-video-t2v-720p-q3_k_m testanime02_epoch53 embrace_kohaya_weights
            midis_CumShower_V0.5[HYVideo] breakfast_hunyuan hunyuan_video_image2video_720 hunyuan_hyperrealism
            hunyuan_video_t2v_720_fp8_scaled hyvid_lora_adapter hunyuan_lora_test_1_epoch10 DHJ-500_steps DHJ-HunYuan
            Hunyuan-videoLoraTest-V10 fortnite_v10 hathaway_style_epoch22 kxsr_walking_left Xiang_Consis_im_lora-000006
            hunyuan_flat_color_v2 xiangling_test_epoch4 dolly-zoom-hunyuan-v1.0-vfx_ai CandidChange_v2_e45
            skyreels_hunyan_t2v_bf16 parkour-freerunning-hunyuan-v1.0-vfx_ai idle_dance DreamPunk_e33 anaglyph_3D
            executive_order_40_epochs aifantasia hunyuan_80s_fantasyv1_5_comfy Retro_Styles_Hunyuan sidebyside_E75
            1950s_epoch50 defaultDance_preview cinematron fluidart-v1_hunyuanvideo_e28 hunyuan_ancientrome
            hunyuan_80s_horror_1000 lone-cyclist-pruned xjx-TokyoRacerV2-comfy pixar_7_epochs hunyuan_kungfu_600
            Neon_Punk_hyv dji_20250103_02-47-51_epoch9 360c4m3r4_e100_only_double_blocks Digital_Human_Hunyuan
            ph2t-h0n-v1.0 thanos-snap-r512-768-e20 Graphical_Clothes_hyv matrix-bullet-time-hunyuan-v1.0-vfx_ai
            hunyuan_mtv_grind_500 venom_hunyuan_video_v1_e40 kxsr_walking_anim_v1-5 fxf-tokyoMeet-comfy
            adapter_model_boxingE40 Comic_Art_Illustration_Style.fp1600018
            high-speed-drone-shot-hunyuan-v1.0-heavy-vfx_ai animal_documentary_epoch20 kbk_backrooms_comfyui
            ultrawide_10_epochs UndergroundClub_hunyuan hunyuan_diffusers hunyuan-video-t2v-720p-bf16
            HunyuanVideo-I2V-33ch hunyuan_video_I2V-Q3_K_S skyreels-hunyuan-I2V-Q3_K_S HunyuanVideo-I2V-FP8
            gin_distillery_hunyuan super_fast_video_motion_lora hunyuan_fastvideogame HunyuanVideo_no-fastvideo_720
            hunyuan-take-on-me Sexy_Dance_e15
            hunyuan_video_720_cfg_distill_fp8_e4m3fn hunyuan_video_i2v_720p_bf16 hunyuan_video_t2v_720p_fp8_scaled aman4
            hunyuan_video_t2v_720p_fp16 asstwerk
            hyvideo-diffusers hunyuan-lora-musubi-vhs-5""",
    },
    "hunyuan_video_15": {
        "lightx2v": """hy1.5_t2v_480p_lightx2v_4step hy1.5_t2v_480p_scaled_fp8_e4m3_lightx2v_4step
            hy1.5_t2v_480p_lightx2v_4step_fp8_e4m3fn_scaled_kj hunyuanvideo1.5_t2v_480p_lightx2v_4step-Q4_K_M
            hy1.5_t2v_480p_lightx2v_4step_quanto_int8_bf16 hy15_480p_t2v_4step_lightx2v
            hunyuanvideo1.5_480p_t2v_4step_lightx2v_fp8 hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16
            hy1.5_t2v_480p_lightx2v_4step_bf16""",
        "lightx2v LoRA": """hunyuan_1_5_LigthX2V_dpm_rank32 1_5_LigthX2V_dpm_rank32
            Hunyuan_video_1_5_LigthX2V_dpm_rank32""",
        "step distilled LoRA": """hunyuan_1_5_i2v_step_distilled_dpm_rank32 1_5_i2v_step_distilled_dpm_rank32
            HunyuanVideo_1.5_i2v_step_distill_lora hy15_i2v_step_distilled_lora_rank64
            Hunyuan_video_1_5_i2v_step_distilled_dpm_rank32""",
        "few steps": """480p_i2v_step_distilled hunyuanvideo1.5_480p_i2v_step_distilled_fp16
            hunyuan_video_1.5_i2v_480_step_distilled_bf16 hunyuan_video_1.5_i2v_480_step_distilled_quanto_bf16_int8
            HunyuanVideo-1.5-Diffusers-480p_i2v_step_distilled hunyuanvideo1.5_480p_i2v_step_distilled_fp8_scaled""",
        "capybara": "capybara_v0.1 capybara_v01_bf16 capybara_v0.1_fp8_scaled",
        "caution": """capybara_v0.1 capybara_v01_bf16 capybara_v0.1_fp8_scaled hunyuanvideo1.5_1080p_sr
            hunyuanvideo1.5_720p_sr_distilled_fp16 720p_i2v_distilled_sparse HY-OmniWeaving HY-WorldPlay
            hy15_t2v_turbo_lora hunyuanvideo1.5_720p_t2v_8_steps hunyuanvideo1.5_distill_lora
            hy15_canny_control_lora hy15_first_last_frame_lora HY-World1.5-Autoregressive-480P-I2V hy15_custom
            hunyuan_video_1.5_upsampler_720_bf16 hunyuan_video_1.5_upsampler_1080_quanto_bf16_int8 hy15_video_edit_lora
            hunyuan_video_1.5_upsampler_1080p_sr_distilled hy15_keyframes_lora hy15_depth_lora hy15_fl2v_lora
            hunyuan_15_upsampler hunyuanvideo15_latent_upsampler_1080p distill_model hunyuan-video-1.5-fast
            hunyuanvideo1.5_i2v_lightning_4steps hunyuanvideo1.5_480p_i2v_turbo_fp8 HY_OmniWeaving_bf16
            Hunyuan_1.5_Upscale_lora hunyuan_video_1.5_upsampler_720p_sr_distilled hy15_t2v_dmd2
            hunyuanvideo1.5_Fast_T2V ar_distilled_action_model hunyuanvideo1.5_1080p_sr_distilled_fp8_scaled
            hunyuanvideo15_720p_i2v_sparse-Q4 720p_i2v_sparse HY15_T2V_step_distill_lora_r64
            hunyuan_video_1.5_upsampler_1080_bf16 hunyuan_video_1.5_upsampler_720_quanto_bf16_int8 minWM HY15-Action2V
            Action2V causal_ode causal_cd ar_diffusion_tf dmd_ourbi HunyuanVideo-1.5-rCM hy1.5_i2v_720p_lightx2v_8step
            hunyuanVideo-1.5-480p-turbo hy15_causal_forcing""",
        "": """hy15_480p_t2v_fp8_e4m3_lightx2v hy15_720p_i2v_fp8_e4m3_lightx2v
            hunyuanvideo1.5_480p_t2v_cfg_distilled_fp16 hunyuanvideo1.5_720p_t2v_fp16 hunyuanvideo1.5_720p_i2v_fp16
            hunyuanvideo1.5_480p_i2v_cfg_distilled_fp8_scaled hunyuanvideo1.5_720p_i2v_cfg_distilled_fp16
            HunyuanVideo-1.5-Diffusers-480p_t2v hunyuanvideo1.5_480p_t2v-Q8_0 hunyuanvideo1.5_720p_t2v_cfg_distilled
            720p_i2v_distilled HunyuanVideo-1.5-Diffusers-480p_i2v_distilled hunyuan_video_1.5_480_bf16
            hunyuan_video_1.5_i2v_480_quanto_bf16_int8 hunyuan_video_1.5_720_quanto_bf16_int8 hv_1_5_lora
            my_custom_hy15_lora capybara_lora_hy15 hy15_distillery_lora
            hunyuan_video_1.5_i2v_720_bf16 hunyuan_video_1.5_t2v_anime_style hy15_portrait_photo_lora
            HunyuanVideo-1.5_I2V_720p-Q4_0 HunyuanVideo-1.5-Diffusers-720p_i2v_distilled hunyuanvideo1.5_720p_t2v-Q4_K_M
            hunyuan_video_1.5_480_quanto_bf16_int8 hunyuan_video_1.5_720_bf16 HunyuanVideo-1.5-Diffusers-720p_t2v
            HunyuanVideo-1.5-Diffusers-720p_i2v 720p_t2v-Q4_K_M hunyuanvideo1.5_720p_i2v_cfg_distilled_fp8_scaled
            hunyuanvideo1.5_480p_t2v_cfg_distilled_fp8_scaled hunyuanvideo1.5-720p-image2video
            480p_distilled HunyuanVideo-1.5-720p-FP8 HunyuanVideo-1.5-480p-FP8 HunyuanVideo-1.5_I2V_480p-GGUF
            hunyuanvideo1.5_480p_t2v_cfg_distilled-Q5_K_S hunyuanvideo1.5_480p_i2v_cfg_distilled-Q4_K_S 720p_t2v
            hunyuanvideo1.5_480p_i2v_fp16 hunyuanvideo1.5_480p_t2v_fp16 hunyuanvideo-1.5-robotwin15-i2v-lora
            hunyuan_video_1.5_i2v_480_bf16 hunyuan_video_1.5_i2v_720_quanto_bf16_int8 hv15_i2v_480p_distilled
            HunyuanVideo-1.5-Diffusers-480p_t2v_distilled GluedHunyuanVideo-1.5 HunyuanVideo-1.5-INT8""",
    },
    "ltx": {
        "distilled 13B 0.9.7": """ltxv-13b-0.9.7-distilled-lora128 ltxv_0.9.7_13B_distilled_lora128_bf16
            ltxv_097_distilled_lora128 ltxv-097-distilled-lora""",
        "distilled 13B": "ltxv-13b-0.9.8-distilled-lora128 lora_distilled_ltxv_098_13b",
        "distilled": "ltxv-2b-0.9.8-distilled-lora",
        "distilled_0.9.6": "ltxv-2b-0.9.6-distilled-lora",
        "caution": """ltxv-097-ic-lora-pose-control-comfyui ltxv-097-ic-lora-depth-control-comfyui
            ltxv-097-ic-lora-canny-control-comfyui ltxv-098-ic-lora-detailer-comfyui LTXV_distilled_lora_rank64
            ltxv-depth-control-lora ltxv_inpaint_lora ltxv_turbo_4steps ltxv-097-ic-lora-canny-control-diffusers
            ltxv-097-ic-lora-depth-control-diffusers ltxv-097-ic-lora-pose-control-diffusers ltxv_distilled_lora
            LTX-Video-ICLoRA-detailer-13b-0.9.8 LTX-Video-ICLoRA-depth-13b-0.9.7 LTX-Video-ICLoRA-canny-13b-0.9.7
            LTX-Video-ICLoRA-pose-13b-0.9.7 ltxv_colorization_lora ltxv_deblur_lora ltxv_motion_track_lora ltxv_remover
            ltxv-subtitle-remover ltxv_video2video_lora ltxv-13b-098-ic-lora-upscale ltxv_lipsync ltxv_face_swap_lora
            ltxv-13b-lcm ltxv_tcd_lora LTXV_8steps_lora ltxv_upscale_lora ltxv_fast_lora""",
        "": """ltx-video-2b-v0.9 ltx-video-2b-v0.9.1 ltx-video-2b-v0.9.5 ltxv-2b-0.9.6-dev-04-25
            ltxv-2b-0.9.6-distilled-04-25 ltxv-2b-0.9.8-distilled ltxv-13b-0.9.7-dev ltxv-13b-0.9.7-distilled
            ltxv-13b-0.9.8-dev ltxv-13b-0.9.8-distilled ltxv-13b-0.9.7-dev-Q4_K_M ltxv-13b-0.9.8-distilled-fp8
            ltx_squish_lora LTX-Video-Cakeify-LoRA ltxv-13b-0.9.8-distilled-8steps
            ltxv_camera_control_dolly_lora ltxv_0.9.8_13B_dev_quanto_bf16_int8 ltxv_0.9.8_13B_distilled_bf16
            ltxv_0.9.7_13B_dev_bf16 ltxv_095_squish_lora ltxv_095_cakeify_lora LTX-Video-Squish-LoRA
            amgery-lora-for-ltxv-13b-0.9.7 nhl-smile-lora-for-ltxv-13b-0.9.7 sorpresa-lora-for-ltxv-13b
            headbanger-lora-for-ltxv-13b-0.9.7 LTX-video_lora_bullet_time ltx_video_anime_landscape_early_lora
            ltx_video_pixel_early_lora ltx-video-trajectory-lora ltxvideo_lora_mine ltxv_moonlight_lora
            ltxv-2b-0.9.8-distilled-q4_0 ltx_13B_quanto_bf16_int8 ltxv_0.9.8_13B_bf16 ltxv_0.9.8_13B_quanto_bf16_int8
            ltx-video-2b-v0.9-Q3_K_S LTX-Video-0.9.8-13B-distilled LTX-Video-Slime-LoRA deforum_morphing_style_ltxv
            LTX_2b_V_0_9_5 LTX_13B_Dev_V_0_9_7 LTX_13B_Dev_V_0_9_7_FP8 LTX_13B_Dev_V_0_9_7_GGUF_Q8_0
            LTX_13B_Dev_V_0_9_7_GGUF_Q6_K LTX_13B_Dev_V_0_9_7_GGUF_Q5_K_M LTX_13B_Dev_V_0_9_7_GGUF_Q4_K_M
            LTXV-13B-0.9.8-distilled-Q3_K_M LTXV-13B-0.9.8-distilled-Q6_K LTXV-13B-0.9.8-distilled-Q8_0
            ltxv-13b-0.9.7-distilled-fp32-q8_0 ltxv-2b-0.9.6-distilled-fp32-q8_0 ltxv-2b-0.9.6-dev-q4_k_s
            ltxv-2b-0.9.8-distilled-q8_0 ltxv-2b-0.9.8-distilled-q6_k ltxv-2b-0.9.8-distilled-iq4_nl
            ltxv-2b-0.9.8-distilled-fp8 ltx-video-2b-v0.9.8-distilled-fp8 ltx-video-13b-v0.9.8-dev-fp8
            ltx-video-13b-v0.9.8-distilled-fp8 ltxv-13b-0.9.7-dev-Q8_0 ltxv-13b-0.9.7-dev-Q6_K LTX-Video-0.9.7-dev
            ltxv_0.9.7_13B_distilled_quanto_bf16_int8 LTX-Video-0.9.7-distilled-diffusers LTX-Video-0.9.7-diffusers
            ltx-video-2b-v0.9.5-Q3_K_M ltxv-13b-0.9.7-dev-Q5_K_M LTXV-13B-LoRA-Wallace_and_Gromit-v1 ltxv-13b-distilled
            LTXV-13B-arcane_jinx_step_12000_comfy LTXV-13B-walgro_style_step_42000_comfy Snorricam_step_02000_comfy
            LTXV-13B-shinkai-anime-style-lora-v1_58000 bullet_time_step_02250_comfy ltx-video-13b-distilled
            ltx-video-2b-v0.9.1-q4_0 ltxv-13b-0.9.7-dev-BF16 ltx-video-2b-v0.9-F32 LTXV-13B-LoRA-Arcane_Jinx-v1
            ltxv_distillery_lora through_object_step_02000_comfy ltx2b_waymo24_action_lora_r16_seed231
            LTX-Video-0.9.6-distilled-Q4_K_M ltx-video-2b-v0.9.6-distilled-BF16 LTX_13B_Distilled_V_0_9_8_GGUF_Q4_K_M
            LTX-MultiMotion
            ltxv_0.9.7_13B_distilled_bf16 ltxv_0.9.8_13B_dev_bf16 ltxv_0.9.8_13B_distilled_quanto_bf16_int8""",
    },
    "mochi": {
        "FastMochi": "FastMochi FastMochi-diffusers mochi_fastvideo_lora dit.fast",
        "caution": """mochi_turbo_lora mochi_distilled_4_steps mochi_fast mochi_preview_fast_bf16 mochi-edit
            mochi_canny_lora mochi-i2v
            mochi_depth_control mochi_rcm_lora mochi_inpaint Pusa-V0.5 pusa_mochi_bf16""",
        "": """mochi_preview_bf16 mochi_preview_fp8_scaled mochi_preview_dit_bf16 mochi_preview_dit_GGUF_Q8_0
            mochi-1-preview mochi-q3_k_m mochi_lora_vhs mochi_dissolve_lora mochi_fast_food_lora fast_videogame_mochi
            FastVideo
            Mochi-Black-Myth-Wukong-lora-weight Genmo_Mochi_1_Text_to_Video Genmo_Mochi_1_Text_to_Video_FP8_Scaled
            mochi-1-preview-mix-nf4 mochi_preview_fp8 mochi_preview_dit_fp8_e4m3fn mochi_preview_dit_GGUF_Q4_0_v2
            mochi_fp8_scaled mochi-q2_k model_2000.lora mochi-1-preview-gguf mochi-1-preview-mix-nf4-small""",
    },
    "framepack": {
        "caution": """fastvideo-lora-hunyuan accvid_5_steps_lora hunyuan_depth_control_lora_v1 FramePack_turbo_8steps
            FramePack_video_edit_lora hunyuan_hed_lora FramePack_P1_HY FramePackP1_I2V_fp8 fp-1f-chibi-1024
            body2img_V7_kisekaeichi_dim4_1e-3_512_768-000140 hagikora_FramePack_oneframe_V3 fp1f_lora
            chibi_framepack_1frame FramePack_rcm_lora
            fp-1f-kisekae-1024-v4-2-PfPHEMA fp-1f-kisekae-1024-v4-2 one_frame_rotation_framepack""",
        "": """FramePackI2V_HY_fp8_e4m3fn FramePack_F1_I2V_HY_20250503_bf16 hyvid_I2V_lora_embrace rotate_landscape_V4
            image2flat_V1_1024_dim4-000040 photo2line_V2_dim4 photo2chara_V6 Apose_V8_dim4 Apose_V7_dim4 CH4NG3CH4R
            FramePack-F1-I2V-HY-20250503-Q4_K_M FramePack-I2V-HY-Q8_0
            framepack-yichen-lora-000002 hyvid_I2V_lora_hair_growth FramePack_F1_I2V_HY_20250503_fp8
            framepack_rotate_lora FramePackI2V_HY_bf16 FramePack_F1_I2V_HY_20250503 breakfast_hunyuan
            framepack_transformer_nf4 framepack_f1_transformer_nf4 Framepack_hunyuanvideo framepack_11frame
            pubg_146_framepack
            framepack_dabaichui dabaichui_2 FramePack_Image_Edit_Lora_Early FramePack-dance-lora-d8""",
    },
}


@pytest.mark.parametrize("family", PUBLISHED_NAMES)
def test_names_of_distillations_and_of_other_tasks_are_known(family: str) -> None:
    """Source: listings of Kijai, city96, calcuis, lightx2v, DeepBeepMeep, phazei, tori29umai, Cseti, Comfy-Org and the
    publishers, and of collections of LoRAs; where a task has no published file, as one could be called."""
    spec, groups = FAMILIES[family], PUBLISHED_NAMES[family]
    asked = {name for group in groups.values() for name in group.split()}
    for name in asked:
        kinds = {kind for kind, group in groups.items() if name in group.split()}
        key = next(iter(kinds - {"caution"}), "")
        assert recipe_named(spec, (name,)) == (key, name if key else ""), name
        assert bool(cautions_by_name(spec, (name,))) == ("caution" in kinds), name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("accvideo_hunyuan_5step_bf16", "the name 'accvideo_hunyuan_5step_bf16' says AccVideo"),
        ("hunyuan_video_custom_720p_bf16", "assumed: its name has a caution"),
        ("hunyuan_video_720_fp8_e4m3fn", "assumed: no name around it says otherwise"),
    ],
)
def test_a_name_that_gives_the_recipe_says_what_the_file_is(tmp_path: Path, name: str, why: str) -> None:
    file = published.sparse(tmp_path / "models" / f"{name}.safetensors", published.shapes("hunyuan_video"))
    file.with_suffix(".json").write_text('{"sd version": "Other"}')  # another program's
    assert config_of(contents(file)[0]).why == why


def test_a_loaded_folder_says_which_name_gave_its_recipe(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.build("hunyuan_video", tiny_folder), tmp_path / "models" / "FastHunyuan-diffusers")
    recipe = next(each for each in load(LoadRequest(folder, device="cpu")).plan.decisions if each.subject == "recipe")
    assert recipe.verdict.startswith("FastHunyuan: 6 steps")
    assert recipe.why.startswith("the name 'FastHunyuan-diffusers' says so; FastVideo/FastHunyuan model card")


@pytest.mark.parametrize(("channels", "named"), [(0, True), (65, True), (98, False)])
def test_a_name_of_a_super_resolution_warns_of_another_transformer_alone(channels: int, named: bool) -> None:
    for name in ("hunyuanvideo1.5_1080p_sr", "hunyuan15_upscale_720p", "HunyuanVideo-1.5-super-resolution"):
        assert bool(cautions_by_name(FAMILIES["hunyuan_video_15"], (name,), channels=channels)) == named


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("ltxv-13b-0.9.8-dev", "distilled 13B"),
        ("ltxv-13b-0.9.7-dev-fp8", "distilled 13B 0.9.7"),
        ("LTX-Video-0.9.8-2B", "distilled"),
        ("ltxv-2b-0.9.6-dev-04-25", "distilled_0.9.6"),
        ("my_model", ""),
        ("ltx-video-2b-v0.9.1", ""),
    ],
)
def test_a_distilled_lora_without_a_version_has_that_of_the_model_that_it_is_for(model: str, recipe: str) -> None:
    spec, base = FAMILIES["ltx"], (model,)
    assert recipe_named(spec, ("ltxv_distilled_lora",), base)[0] == recipe
    assert bool(cautions_by_name(spec, ("ltxv_distilled_lora",), base=base)) == (not recipe)
    for other in ("ltxv_squish_lora", "ltxv_turbo_4steps_lora", "whisky_distillery_lora"):
        assert (
            recipe_named(spec, (other,), (f"{model}-distilled-lora",)) == recipe_named(spec, (other,), base) == ("", "")
        )


def test_the_title_in_a_file_comes_before_its_name(tmp_path: Path) -> None:
    """Of a model, of one as GGUF, and of a LoRA, whose trainers write other keys."""
    shapes = published.shapes("hunyuan_video")
    titled = published.sparse(
        tmp_path / "models" / "FastHunyuan.safetensors", shapes, metadata={"modelspec.title": "AccVideo"}
    )
    assert config_of(contents(titled)[0]).why == "the name 'AccVideo' says AccVideo"
    packed = published.sparse_gguf(tmp_path / "models" / "hunyuan-q4_0.gguf", shapes, "Q4_0", "AccVideo 5")
    assert config_of(contents(packed)[0]).why == "the name 'AccVideo 5' says AccVideo"
    trained = published.sparse(
        tmp_path / "a.safetensors", {"x": (1,)}, metadata={"ss_output_name": "hunyuan_canny_lora"}
    )
    assert cautions_by_name(FAMILIES["hunyuan_video"], evidence_of(trained, {}).names)


def test_at_least_eighty_published_names_are_held() -> None:
    kinds = [(kind, set(group.split())) for groups in PUBLISHED_NAMES.values() for kind, group in groups.items()]
    told, plain = (set().union(*(names for kind, names in kinds if bool(kind) == said)) for said in (True, False))
    assert len(told) >= 180 and len(plain) >= 300
