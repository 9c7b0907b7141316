// Core's own template graphs, one stage each, with the nodes that fit core's models to an older GPU; made like those
// of workflows.spec.mjs.
import { CAT } from "./workflows.spec.mjs";

const BLUR = "blurry, low quality, still frame, watermark, titles, subtitles";
const HUB = "https://huggingface.co/";

const WHY =
  "Core's own graph with **AnyGPU Fit** behind its loaders. A GPU without fast bf16 (RTX 20, V100, GTX, RX 6000) then " +
  "computes in safe fp16, where core alone computes in fp32 or gives black frames, and each decode is checked. The text " +
  "under the node has a line for each part, which says what was done.";

/** The text of a note: title, what it is, and what to download: [file, folder, page, folder in the page] each. */
const note = (title, text, files, gib) => ({
  kind: "MarkdownNote",
  title: "Read me",
  values: {
    text: [
      `# ${title}`,
      text,
      "## Download",
      ...files.map(([file, folder, page]) => `- **${file}** from [${page}](${HUB}${page}) to *ComfyUI/models/${folder}*`),
      "## Memory",
      `The files of core's template hold ${gib} GiB. Core streams what does not fit: there is no *offload* to choose. ` +
        "The peak on a GPU was not measured.",
    ].join("\n\n"),
  },
});

const text = (value) => ({ kind: "CLIPTextEncode", values: { text: value }, links: { clip: ["fit", "clip"] } });
const load = (unet_name) => ({ kind: "UNETLoader", values: { unet_name } });
const loadVAE = (vae_name) => ({ kind: "VAELoader", values: { vae_name } });
const loadCLIP = (clip_name, type) => ({ kind: "CLIPLoader", values: { clip_name, type } });
const loadCLIPs = (clip_name1, clip_name2, type) => ({ kind: "DualCLIPLoader", values: { clip_name1, clip_name2, type } });
const shift = (amount) => ({ kind: "ModelSamplingSD3", values: { shift: amount }, links: { model: ["load", "MODEL"] } });
const fit = (model, vae = ["vae", "VAE"]) => ({ kind: "AnyGPUFit", links: { model, vae, clip: ["clip", "CLIP"] } });
const seen = (image) => ({
  kind: "CLIPVisionEncode",
  values: { crop: "none" },
  links: { clip_vision: ["eyes", "CLIP_VISION"], image },
});
/** The loaders, fitted, and both texts; `amount` of core's shift before that, if any. */
const described = (unet, clip, vae, negative, amount) => ({
  load: load(unet),
  clip,
  vae: loadVAE(vae),
  ...(amount && { shift: shift(amount) }),
  fit: fit([amount ? "shift" : "load", "MODEL"]),
  positive: text(CAT),
  negative: text(negative),
});
const picture = (title) => ({ kind: "LoadImage", title, values: { image: "example.png" } });
const decode = (samples, fitted = "fit") => ({ kind: "VAEDecode", links: { samples, vae: [fitted, "vae"] } });
const video = (fps, more = {}) => ({
  kind: "CreateVideo",
  values: { fps },
  links: { images: ["decode", "IMAGE"], ...more },
});
const save = (name) => ({
  kind: "SaveVideo",
  values: { filename_prefix: `video/${name}` },
  links: { video: ["video", "VIDEO"] },
});
const TEXTS = { positive: ["positive", "CONDITIONING"], negative: ["negative", "CONDITIONING"] };
/** Core's KSampler from the conditioning and latent that `from` gives, or the text nodes and an empty latent. */
const sampled = (values, from, latent = "LATENT", model = ["fit", "model"]) => ({
  kind: "KSampler",
  values: { seed: 42, control_after_generate: "randomize", denoise: 1, ...values },
  links: {
    model,
    ...(from ? { positive: [from, "positive"], negative: [from, "negative"] } : TEXTS),
    latent_image: [from ?? "empty", latent],
  },
});
const scheduled = (steps) => ({
  kind: "BasicScheduler",
  values: { scheduler: "simple", steps, denoise: 1 },
  links: { model: ["fit", "model"] },
});
const solver = (sampler_name) => ({ kind: "KSamplerSelect", values: { sampler_name } });
const noise = { kind: "RandomNoise", values: { noise_seed: 42 } };
const guided = (sigmas, latent) => ({
  kind: "SamplerCustomAdvanced",
  links: {
    noise: ["noise", "NOISE"],
    guider: ["guider", "GUIDER"],
    sampler: ["solver", "SAMPLER"],
    sigmas,
    latent_image: latent,
  },
});

const LTX2 = "ltx-2-19b-dev-fp8.safetensors";
const GEMMA = "gemma_3_12B_it_fp4_mixed.safetensors";
const UMT5 = "umt5_xxl_fp8_e4m3fn_scaled.safetensors";
const QWEN = "qwen_2.5_vl_7b_fp8_scaled.safetensors";
const HUNYUAN_15 = "Comfy-Org/HunyuanVideo_1.5_repackaged";
const ANIMATE = "Comfy-Org/Wan-Animate-2";
const SPECS = {
  anygpu_ltx2_on_an_older_gpu: {
    title: "LTX-2 on an older GPU: core's graph in safe fp16",
    files: [
      [LTX2, "checkpoints", "Lightricks/LTX-2", ""],
      [GEMMA, "text_encoders", "Comfy-Org/ltx-2", "split_files/text_encoders/"],
    ],
    gib: 42,
    nodes: {
      load: { kind: "CheckpointLoaderSimple", values: { ckpt_name: LTX2 } },
      clip: { kind: "LTXAVTextEncoderLoader", values: { text_encoder: GEMMA, ckpt_name: LTX2 } },
      sound: { kind: "LTXVAudioVAELoader", values: { ckpt_name: LTX2 } },
      fit: fit(["load", "MODEL"], ["load", "VAE"]),
      positive: text(CAT),
      negative: text(BLUR),
      rate: {
        kind: "LTXVConditioning",
        values: { frame_rate: 24 },
        links: TEXTS,
      },
      empty: { kind: "EmptyLTXVLatentVideo", values: { width: 768, height: 512, length: 97, batch_size: 1 } },
      silence: {
        kind: "LTXVEmptyLatentAudio",
        values: { frames_number: 97, frame_rate: 24, batch_size: 1 },
        links: { audio_vae: ["sound", "Audio VAE"] },
      },
      both: {
        kind: "LTXVConcatAVLatent",
        links: { video_latent: ["empty", "LATENT"], audio_latent: ["silence", "Latent"] },
      },
      noise,
      solver: solver("euler_ancestral"),
      sigmas: {
        kind: "LTXVScheduler",
        values: { steps: 20, max_shift: 2.05, base_shift: 0.95, stretch: true, terminal: 0.1 },
        links: { latent: ["both", "latent"] },
      },
      guider: {
        kind: "CFGGuider",
        values: { cfg: 4 },
        links: { model: ["fit", "model"], positive: ["rate", "positive"], negative: ["rate", "negative"] },
      },
      sample: guided(["sigmas", "SIGMAS"], ["both", "latent"]),
      apart: { kind: "LTXVSeparateAVLatent", links: { av_latent: ["sample", "denoised_output"] } },
      decode: decode(["apart", "video_latent"]),
      heard: {
        kind: "LTXVAudioVAEDecode",
        links: { samples: ["apart", "audio_latent"], audio_vae: ["sound", "Audio VAE"] },
      },
      video: video(24, { audio: ["heard", "Audio"] }),
    },
    columns: [["load", "clip", "sound"], ["fit"], ["positive", "negative"],
      ["rate", "empty", "silence", "both"], ["noise", "solver", "sigmas", "guider"], ["sample", "apart"],
      ["decode", "heard", "video"]],
  },
  anygpu_wan22_on_an_older_gpu: {
    title: "Wan 2.2 on an older GPU: core's graph in safe fp16",
    files: [
      ["wan2.2_ti2v_5B_fp16.safetensors", "diffusion_models", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "split_files/diffusion_models/"],
      ["wan2.2_vae.safetensors", "vae", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "split_files/vae/"],
      [UMT5, "text_encoders", "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "split_files/text_encoders/"],
    ],
    gib: 17,
    nodes: {
      ...described("wan2.2_ti2v_5B_fp16.safetensors", loadCLIP(UMT5, "wan"), "wan2.2_vae.safetensors", BLUR, 8),
      empty: {
        kind: "Wan22ImageToVideoLatent",
        values: { width: 1280, height: 704, length: 121, batch_size: 1 },
        links: { vae: ["fit", "vae"] },
      },
      sample: sampled({ steps: 20, cfg: 5, sampler_name: "uni_pc", scheduler: "simple" }),
      decode: decode(["sample", "LATENT"]),
      video: video(24),
    },
    columns: [["load", "clip", "vae"], ["shift", "fit"], ["positive", "negative"], ["empty"], ["sample"],
      ["decode", "video"]],
  },
  anygpu_minimax_h3_on_an_older_gpu: {
    title: "MiniMax H3 on an older GPU: core's graph in safe fp16",
    files: [
      ["minimax_h3_fl2va_pruned_int8_convrot.safetensors", "diffusion_models", "Comfy-Org/MiniMax-H3", "diffusion_models/"],
      ["minimax_h3_video_vae_fp16.safetensors", "vae", "Comfy-Org/MiniMax-H3", "vae/"],
      ["minimax_h3_audio_vae_fp32.safetensors", "vae", "Comfy-Org/MiniMax-H3", "vae/"],
      ["qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "text_encoders", "Comfy-Org/MiniMax-H3", "text_encoders/"],
    ],
    gib: 53,
    nodes: {
      load: load("minimax_h3_fl2va_pruned_int8_convrot.safetensors"),
      clip: loadCLIP("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax"),
      vae: loadVAE("minimax_h3_video_vae_fp16.safetensors"),
      sound: loadVAE("minimax_h3_audio_vae_fp32.safetensors"),
      fit: fit(["load", "MODEL"]),
      prompt: {
        kind: "MiniMaxH3ImageToVideo",
        values: { prompt: CAT, width: 864, height: 480, length: 56 },
        links: { clip: ["fit", "clip"], vae: ["fit", "vae"] },
      },
      noise,
      solver: solver("res_multistep"),
      sigmas: scheduled(20),
      guider: {
        kind: "BasicGuider",
        links: { model: ["fit", "model"], conditioning: ["prompt", "positive"] },
      },
      sample: guided(["sigmas", "SIGMAS"], ["prompt", "LATENT"]),
      decode: decode(["sample", "output"]),
      heard: { kind: "VAEDecodeAudio", links: { samples: ["sample", "output"], vae: ["sound", "VAE"] } },
      video: video(24, { audio: ["heard", "AUDIO"] }),
    },
    columns: [["load", "clip", "vae", "sound"], ["fit"], ["prompt"], ["noise", "solver", "sigmas", "guider"],
      ["sample"], ["decode", "heard", "video"]],
  },
  anygpu_hunyuan_video_15_on_an_older_gpu: {
    title: "HunyuanVideo 1.5 on an older GPU: core's graph in safe fp16",
    files: [
      ["hunyuanvideo1.5_720p_t2v_fp16.safetensors", "diffusion_models", HUNYUAN_15, "split_files/diffusion_models/"],
      ["hunyuanvideo15_vae_fp16.safetensors", "vae", HUNYUAN_15, "split_files/vae/"],
      [QWEN, "text_encoders", HUNYUAN_15, "split_files/text_encoders/"],
      ["byt5_small_glyphxl_fp16.safetensors", "text_encoders", HUNYUAN_15, "split_files/text_encoders/"],
    ],
    gib: "with those of its upscaler 42",
    nodes: {
      ...described("hunyuanvideo1.5_720p_t2v_fp16.safetensors", loadCLIPs(QWEN, "byt5_small_glyphxl_fp16.safetensors", "hunyuan_video_15"), "hunyuanvideo15_vae_fp16.safetensors", "", 7),
      empty: { kind: "EmptyHunyuanVideo15Latent", values: { width: 1280, height: 720, length: 121, batch_size: 1 } },
      noise,
      solver: solver("euler"),
      sigmas: scheduled(20),
      guider: {
        kind: "CFGGuider",
        values: { cfg: 6 },
        links: { model: ["fit", "model"], ...TEXTS },
      },
      sample: guided(["sigmas", "SIGMAS"], ["empty", "LATENT"]),
      decode: decode(["sample", "output"]),
      video: video(24),
    },
    columns: [["load", "clip", "vae"], ["shift", "fit"], ["positive", "negative"], ["empty"],
      ["noise", "solver", "sigmas", "guider"], ["sample"], ["decode", "video"]],
  },
  anygpu_kandinsky5_on_an_older_gpu: {
    title: "Kandinsky 5 on an older GPU: core's graph in safe fp16",
    files: [
      ["kandinsky5lite_t2v_sft_5s.safetensors", "diffusion_models", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s", "model/"],
      ["hunyuan_video_vae_bf16.safetensors", "vae", "Kijai/HunyuanVideo_comfy", ""],
      [QWEN, "text_encoders", HUNYUAN_15, "split_files/text_encoders/"],
      ["clip_l.safetensors", "text_encoders", "comfyanonymous/flux_text_encoders", ""],
    ],
    gib: 14,
    nodes: {
      ...described("kandinsky5lite_t2v_sft_5s.safetensors", loadCLIPs(QWEN, "clip_l.safetensors", "kandinsky5"), "hunyuan_video_vae_bf16.safetensors", "", 5),
      empty: {
        kind: "Kandinsky5ImageToVideo",
        values: { width: 768, height: 512, length: 121, batch_size: 1 },
        links: { ...TEXTS, vae: ["fit", "vae"] },
      },
      sample: sampled({ steps: 50, cfg: 5, sampler_name: "euler_ancestral", scheduler: "beta" }, "empty", "latent"),
      decode: decode(["sample", "LATENT"]),
      video: video(24),
    },
    columns: [["load", "clip", "vae"], ["shift", "fit"], ["positive", "negative"], ["empty"], ["sample"],
      ["decode", "video"]],
  },
  anygpu_cosmos_predict2_on_an_older_gpu: {
    title: "Cosmos Predict2 on an older GPU: core's graph in safe fp16",
    files: [
      ["cosmos_predict2_2B_video2world_480p_16fps.safetensors", "diffusion_models", "Comfy-Org/Cosmos_Predict2_repackaged", ""],
      ["wan_2.1_vae.safetensors", "vae", "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "split_files/vae/"],
      ["oldt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", "comfyanonymous/cosmos_1.0_text_encoder_and_VAE_ComfyUI", "text_encoders/"],
    ],
    gib: 8.4,
    nodes: {
      ...described("cosmos_predict2_2B_video2world_480p_16fps.safetensors", loadCLIP("oldt5_xxl_fp8_e4m3fn_scaled.safetensors", "cosmos"), "wan_2.1_vae.safetensors", BLUR),
      first: picture("The first frame"),
      empty: {
        kind: "CosmosPredict2ImageToVideoLatent",
        values: { width: 848, height: 480, length: 93, batch_size: 1 },
        links: { vae: ["fit", "vae"], start_image: ["first", "IMAGE"] },
      },
      sample: sampled({ steps: 35, cfg: 4, sampler_name: "euler", scheduler: "karras" }),
      decode: decode(["sample", "LATENT"]),
      video: video(16),
    },
    columns: [["load", "clip", "vae"], ["fit"], ["positive", "negative"], ["first", "empty"], ["sample"],
      ["decode", "video"]],
  },
  anygpu_wan_animate_on_an_older_gpu: {
    title: "Wan Animate 2 on an older GPU: core's graph in safe fp16",
    files: [
      ["wan_animate_2_int8_convrot.safetensors", "diffusion_models", ANIMATE, "diffusion_models/"],
      ["lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", "loras", ANIMATE, "loras/"],
      ["Wan2_1_VAE_bf16.safetensors", "vae", ANIMATE, "vae/"],
      [UMT5, "text_encoders", ANIMATE, "text_encoders/"],
      ["clip_vision_h.safetensors", "clip_vision", ANIMATE, "clip_vision/"],
    ],
    gib: 24,
    tallest: 1500,
    below: 2,
    nodes: {
      load: load("wan_animate_2_int8_convrot.safetensors"),
      lora: {
        kind: "LoraLoaderModelOnly",
        values: { lora_name: "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", strength_model: 1 },
        links: { model: ["load", "MODEL"] },
      },
      clip: loadCLIP(UMT5, "wan"),
      vae: loadVAE("Wan2_1_VAE_bf16.safetensors"),
      eyes: { kind: "CLIPVisionLoader", values: { clip_name: "clip_vision_h.safetensors" } },
      fit: fit(["lora", "MODEL"]),
      cache: { kind: "WanAnimate2Cache", values: { device: "cpu", dtype: "int8" }, links: { model: ["fit", "model"] } },
      who: picture("Who moves"),
      motion: { kind: "LoadVideo", title: "How", values: { file: "example.mp4" } },
      parts: { kind: "GetVideoComponents", links: { video: ["motion", "VIDEO"] } },
      start: { kind: "ImageFromBatch", values: { batch_index: 0, length: 1 }, links: { image: ["parts", "images"] } },
      seen: seen(["who", "IMAGE"]),
      seenmotion: seen(["start", "IMAGE"]),
      positive: text(
        "Character appearance description: a woman with short pink hair in a black leather jacket.\n" +
          "Background description: an empty white room.",
      ),
      dance: text("a person dances"),
      negative: text(BLUR),
      scene: {
        kind: "WanAnimate2ToVideo",
        height: 460,
        values: { width: 480, height: 832, length: 81, batch_size: 1 },
        links: {
          ...TEXTS,
          vae: ["fit", "vae"],
          reference_image: ["who", "IMAGE"],
          pose_video: ["parts", "images"],
          clip_vision_output: ["seen", "CLIP_VISION_OUTPUT"],
          positive_pose: ["dance", "CONDITIONING"],
          clip_vision_output_pose: ["seenmotion", "CLIP_VISION_OUTPUT"],
        },
      },
      sample: sampled({ steps: 6, cfg: 1, sampler_name: "lcm", scheduler: "simple" }, "scene", "latent", ["cache", "MODEL"]),
      trim: {
        kind: "TrimVideoLatent",
        links: { samples: ["sample", "LATENT"], trim_amount: ["scene", "trim_latent"] },
      },
      decode: decode(["trim", "LATENT"]),
      video: { ...video(24), links: { images: ["decode", "IMAGE"], audio: ["parts", "audio"], fps: ["parts", "fps"] } },
    },
    columns: [["load", "lora", "clip", "vae", "eyes"], ["fit", "cache"], ["who", "motion", "parts"],
      ["start", "seen", "seenmotion"], ["positive", "dance", "negative"], ["scene"], ["sample", "trim"], ["decode", "video"]],
  },
  anygpu_rescue_a_vae_decode: {
    title: "Rescue a VAE decode: fp32, then tiles, then the CPU",
    why:
      "Brings back what was sampled last and decodes it with core's VAE Decode through **AnyGPU Fit VAE**: after NaN, one " +
      "colour or a shortage of memory it goes on in fp32, in smaller tiles, and at last on the CPU. Choose a particular " +
      "sampling in *kept*, and the VAE that belongs to its model.",
    files: [["wan2.2_vae.safetensors", "vae", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "split_files/vae/"]],
    gib: 1.3,
    nodes: {
      latent: { kind: "AnyGPURecoverLatents" },
      vae: loadVAE("wan2.2_vae.safetensors"),
      fitvae: { kind: "AnyGPUFitVAE", links: { vae: ["vae", "VAE"] } },
      decode: decode(["latent", "latent"], "fitvae"),
      video: video(24),
    },
    columns: [["latent", "vae"], ["fitvae"], ["decode", "video"]],
  },
};

const HEIGHTS = { cache: 125, load: 130, lora: 120, clip: 150, vae: 110, sound: 110, eyes: 110, positive: 180, negative: 140, prompt: 420, fit: 330, fitvae: 160, who: 330, motion: 330, first: 330 };

const GROUPS = { load: "Load", latent: "Load", fit: "Fit to this GPU", shift: "Fit to this GPU", fitvae: "Fit to this GPU", who: "Show", start: "Look", first: "Size", scene: "Size", positive: "Describe", prompt: "Describe", empty: "Size", rate: "Size", noise: "Sample", sample: "Sample", decode: "See" };

const HASHES = { [UMT5]: "c3355d30191f1f066b26d93fba017ae9809dce6c627dda5f6a66eaa651204f68" };

/** The files that a node of core's loads, as core's dialog of missing models wants them; undefined for none. */
function modelsOf({ values = {} }, files) {
  const rows = files.filter(([name]) => Object.values(values).includes(name));
  const models = rows.map(([name, directory, page, inside]) => ({
    name,
    url: `${HUB}${page}/resolve/main/${inside}${name}`,
    ...(HASHES[name] && { hash: HASHES[name], hash_type: "SHA256" }),
    directory,
  }));
  return models.length ? models : undefined;
}

/** The note stands first, then the columns of the specification, the result before the last, or as many as are `below` it. */
function workflow(name, { title, why = WHY, files, gib, nodes, columns, tallest, below = 1 }) {
  const placed = (key) => ({ key, width: 360, height: nodes[key].height ?? HEIGHTS[key] });
  const grouped = columns.map((keys) => ({ group: GROUPS[keys[0]], nodes: keys.map(placed) }));
  const offered = Object.fromEntries(Object.entries(nodes).map(([key, node]) => [key, { ...node, models: modelsOf(node, files) }]));
  return {
    nodes: { note: note(title, why, files, gib), ...offered, save: save(name) },
    columns: [
      [{ key: "note", width: 420, height: 540 }],
      ...grouped.slice(0, -below),
      { group: "Save", nodes: [{ key: "save", width: 360, height: 440 }] }, // above the decode: clear of the minimap
      ...grouped.slice(-below),
    ],
    tallest,
  };
}

export const FIT_WORKFLOWS = Object.fromEntries(
  Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]),
);
