// Core's own template graphs, one stage each, with the nodes that fit core's models to an older GPU; made like those
// of workflows.spec.mjs.
import { CAT } from "./workflows.spec.mjs";

const BLUR = "blurry, low quality, still frame, watermark, titles, subtitles";
const HUB = "https://huggingface.co/";

const WHY =
  "Core's own graph with **AnyGPU Fit Model** before the sampler and **AnyGPU Fit VAE** before the decode. A GPU without " +
  "fast bf16 (RTX 20, V100, GTX, RX 6000) then computes in safe fp16, where core alone computes in fp32 " +
  "or gives black frames. On a GPU that needs nothing both change nothing. The text under each node says what was done.";

/** The text of a note: title, what it is, and what to download: [file, folder, page, folder in the page] each. */
const note = (title, text, files, gib) => ({
  kind: "MarkdownNote",
  title: "Read me",
  values: {
    text: [
      `# ${title}`,
      text,
      "## Download",
      ...files.map(([file, folder, page]) => `- \`${file}\` from [${page}](${HUB}${page}) to *ComfyUI/models/${folder}*`),
      "## Memory",
      `The files of core's template hold ${gib} GiB. Core streams what does not fit: there is no *offload* to choose. ` +
        "The peak on a GPU was not measured.",
    ].join("\n\n"),
  },
});

const text = (value, clip = ["clip", "CLIP"]) => ({ kind: "CLIPTextEncode", values: { text: value }, links: { clip } });
const fitModel = (model) => ({ kind: "AnyGPUFitModel", links: { model } });
const fitVAE = (vae) => ({ kind: "AnyGPUFitVAE", links: { vae } });
const decode = (samples) => ({ kind: "VAEDecode", links: { samples, vae: ["fitvae", "vae"] } });
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
      fit: fitModel(["load", "MODEL"]),
      fitvae: fitVAE(["load", "VAE"]),
      positive: text(CAT),
      negative: text(BLUR),
      rate: {
        kind: "LTXVConditioning",
        values: { frame_rate: 24 },
        links: { positive: ["positive", "CONDITIONING"], negative: ["negative", "CONDITIONING"] },
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
      solver: { kind: "KSamplerSelect", values: { sampler_name: "euler_ancestral" } },
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
    columns: [["load", "clip", "sound"], ["fit", "fitvae"], ["positive", "negative"],
      ["rate", "empty", "silence", "both"], ["noise", "solver", "sigmas", "guider"], ["sample", "apart"],
      ["decode", "heard", "video"]],
  },
  anygpu_wan22_on_an_older_gpu: {
    title: "Wan 2.2 on an older GPU: core's graph in safe fp16",
    files: [
      ["wan2.2_ti2v_5B_fp16.safetensors", "diffusion_models", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "split_files/diffusion_models/"],
      ["wan2.2_vae.safetensors", "vae", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged", "split_files/vae/"],
      ["umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "split_files/text_encoders/"],
    ],
    gib: 17,
    nodes: {
      load: { kind: "UNETLoader", values: { unet_name: "wan2.2_ti2v_5B_fp16.safetensors" } },
      clip: { kind: "CLIPLoader", values: { clip_name: "umt5_xxl_fp8_e4m3fn_scaled.safetensors", type: "wan" } },
      vae: { kind: "VAELoader", values: { vae_name: "wan2.2_vae.safetensors" } },
      shift: { kind: "ModelSamplingSD3", values: { shift: 8 }, links: { model: ["load", "MODEL"] } },
      fit: fitModel(["shift", "MODEL"]),
      fitvae: fitVAE(["vae", "VAE"]),
      positive: text(CAT),
      negative: text(BLUR),
      empty: {
        kind: "Wan22ImageToVideoLatent",
        values: { width: 1280, height: 704, length: 121, batch_size: 1 },
        links: { vae: ["fitvae", "vae"] },
      },
      sample: {
        kind: "KSampler",
        values: { seed: 42, control_after_generate: "randomize", steps: 20, cfg: 5, sampler_name: "uni_pc",
          scheduler: "simple", denoise: 1 },
        links: { model: ["fit", "model"], positive: ["positive", "CONDITIONING"],
          negative: ["negative", "CONDITIONING"], latent_image: ["empty", "LATENT"] },
      },
      decode: decode(["sample", "LATENT"]),
      video: video(24),
    },
    columns: [["load", "clip", "vae"], ["shift", "fit", "fitvae"], ["positive", "negative"], ["empty"], ["sample"],
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
      load: { kind: "UNETLoader", values: { unet_name: "minimax_h3_fl2va_pruned_int8_convrot.safetensors" } },
      clip: {
        kind: "CLIPLoader",
        values: { clip_name: "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", type: "minimax" },
      },
      vae: { kind: "VAELoader", values: { vae_name: "minimax_h3_video_vae_fp16.safetensors" } },
      sound: { kind: "VAELoader", values: { vae_name: "minimax_h3_audio_vae_fp32.safetensors" } },
      fit: fitModel(["load", "MODEL"]),
      fitvae: fitVAE(["vae", "VAE"]),
      prompt: {
        kind: "MiniMaxH3ImageToVideo",
        values: { prompt: CAT, width: 864, height: 480, length: 56 },
        links: { clip: ["clip", "CLIP"], vae: ["fitvae", "vae"] },
      },
      noise,
      solver: { kind: "KSamplerSelect", values: { sampler_name: "res_multistep" } },
      sigmas: {
        kind: "BasicScheduler",
        values: { scheduler: "simple", steps: 20, denoise: 1 },
        links: { model: ["fit", "model"] },
      },
      guider: {
        kind: "BasicGuider",
        links: { model: ["fit", "model"], conditioning: ["prompt", "positive"] },
      },
      sample: guided(["sigmas", "SIGMAS"], ["prompt", "LATENT"]),
      decode: decode(["sample", "output"]),
      heard: { kind: "VAEDecodeAudio", links: { samples: ["sample", "output"], vae: ["sound", "VAE"] } },
      video: video(24, { audio: ["heard", "AUDIO"] }),
    },
    columns: [["load", "clip", "vae", "sound"], ["fit", "fitvae"], ["prompt"], ["noise", "solver", "sigmas", "guider"],
      ["sample"], ["decode", "heard", "video"]],
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
      vae: { kind: "VAELoader", values: { vae_name: "wan2.2_vae.safetensors" } },
      fitvae: fitVAE(["vae", "VAE"]),
      decode: decode(["latent", "latent"]),
      video: video(24),
    },
    columns: [["latent", "vae"], ["fitvae"], ["decode", "video"]],
  },
};

const HEIGHTS = { positive: 220, negative: 160, prompt: 420, fit: 200, fitvae: 160 };

const GROUPS = { load: "Load", latent: "Load", fit: "Fit to this GPU", shift: "Fit to this GPU", fitvae: "Fit to this GPU", positive: "Describe", prompt: "Describe", empty: "Size", rate: "Size", noise: "Sample", sample: "Sample", decode: "See" };

const HASHES = { "umt5_xxl_fp8_e4m3fn_scaled.safetensors": "c3355d30191f1f066b26d93fba017ae9809dce6c627dda5f6a66eaa651204f68" };

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

/** The note stands first, then the columns of the specification, then the result. */
function workflow(name, { title, why = WHY, files, gib, nodes, columns }) {
  const placed = (key) => ({ key, width: 360, height: HEIGHTS[key] ?? 190 });
  const offered = Object.fromEntries(Object.entries(nodes).map(([key, node]) => [key, { ...node, models: modelsOf(node, files) }]));
  return {
    nodes: { note: note(title, why, files, gib), ...offered, save: save(name) },
    columns: [
      [{ key: "note", width: 480, height: 640 }],
      ...columns.map((keys) => ({ group: GROUPS[keys[0]], nodes: keys.map(placed) })),
      { group: "Save", nodes: [{ key: "save", width: 460, height: 460 }] },
    ],
  };
}

export const FIT_WORKFLOWS = Object.fromEntries(
  Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]),
);
