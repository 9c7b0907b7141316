// What each shipped workflow consists of: nodes with their values and links, in columns, and its note.

const LOAD = "AnyGPULoadPipeline";

/** GiB of bf16 weights: parameter counts times two bytes, from the models' configurations; nothing here was measured. */
const GIB = {
  ltx: { "text encoder (T5-XXL)": 8.9, transformer: 3.6, VAE: 0.8 },
  ltx_condition: { "text encoder (T5-XXL)": 8.9, transformer: 3.6, VAE: 2.3 },
  hunyuan_video: { "text encoder (Llama)": 14.0, "text encoder 2 (CLIP)": 0.2, transformer: 23.9, VAE: 0.5 },
  hunyuan_video_i2v: { "text encoder (Llava)": 15.6, "text encoder 2 (CLIP)": 0.2, transformer: 23.9, VAE: 0.5 },
  hunyuan_video_15: { "text encoder (Qwen2.5-VL)": 13.2, "text encoder 2 (ByT5)": 0.4, transformer: 15.5, VAE: 2.3 },
  hunyuan_video_15_i2v: {
    "text encoder (Qwen2.5-VL)": 13.2,
    "text encoder 2 (ByT5)": 0.4,
    "image encoder (SigLIP)": 0.8,
    transformer: 15.5,
    VAE: 2.3,
  },
  framepack: {
    "text encoder (Llama)": 14.0,
    "text encoder 2 (CLIP)": 0.2,
    "image encoder (SigLIP)": 0.8,
    transformer: 24.0,
    VAE: 0.5,
  },
  mochi: { "text encoder (T5-XXL)": 8.9, transformer: 18.7, VAE: 0.9 },
};

const HUNYUAN = "hunyuanvideo-community/HunyuanVideo";
const DOWNLOADS = {
  ltx: ["Lightricks/LTX-Video"],
  ltx_condition: ["Lightricks/LTX-Video-0.9.5"],
  hunyuan_video: [HUNYUAN],
  hunyuan_video_i2v: [`${HUNYUAN}-I2V`],
  hunyuan_video_15: [`${HUNYUAN}-1.5-Diffusers-480p_t2v`],
  hunyuan_video_15_i2v: [`${HUNYUAN}-1.5-Diffusers-480p_i2v`],
  framepack: ["lllyasviel/FramePackI2V_HY", HUNYUAN, "lllyasviel/flux_redux_bfl"],
  framepack_f1: ["lllyasviel/FramePack_F1_I2V_HY_20250503", HUNYUAN, "lllyasviel/flux_redux_bfl"],
  mochi: ["genmo/mochi-1-preview"],
};

/** What a model takes, as its note says it. */
function memory(model) {
  const sizes = Object.entries(GIB[model] ?? GIB.framepack).map(([part, size]) => `${part} ${size.toFixed(1)} GiB`);
  const counted = `bf16, counted, not measured: ${sizes.join(", ")}. *offload* auto streams what does not fit; the **AnyGPU** tab says `;
  return `## Memory\n${counted}what this graph needs here.`;
}

/** The text of a workflow's note. */
function note(title, model, text) {
  const places = DOWNLOADS[model].map((page) => `- huggingface.co/${page} into **ComfyUI/models/diffusers/${page.split("/")[1]}**`);
  return [
    `# ${title}`,
    text,
    "## Get the model",
    "The button **Download** under *AnyGPU Load Pipeline* fetches what is needed of:",
    "",
    ...places,
    "",
    "Press **R** afterwards, then choose it in *AnyGPU Load Pipeline*.",
    memory(model),
  ]
    .join("\n")
    .replaceAll("\n## ", "\n\n## ");
}

const WITHOUT = "worst quality, inconsistent motion, blurry, jittery, distorted";

const load = (model, values = {}) => ({ kind: LOAD, values: { model, ...values } });
const prompt = (text, negative = "", links = {}) => ({
  kind: "AnyGPUEncodePrompt",
  values: { text, negative },
  links: { pipeline: ["load", "pipeline"], ...links },
});
const image = (values = {}, from = "image", links = {}) => ({
  kind: "AnyGPUEncodeImage",
  values,
  links: { pipeline: ["load", "pipeline"], image: [from, "IMAGE"], ...links },
});
const sample = (values, links = {}) => ({
  kind: "AnyGPUSample",
  values: { seed: 42, control_after_generate: "randomize", ...values },
  links: { pipeline: ["load", "pipeline"], prompt: ["prompt", "prompt"], ...links },
});
const pack = (values) => ({
  kind: "AnyGPUSampleFramePack",
  values: { seed: 42, control_after_generate: "randomize", ...values },
  links: { pipeline: ["load", "pipeline"], prompt: ["prompt", "prompt"], image: ["encoded", "image"] },
});
const decode = { kind: "AnyGPUDecode", links: { pipeline: ["load", "pipeline"], latent: ["sample", "latent"] } };
const lora = (file, values = {}, from = "load") => ({
  kind: "AnyGPULoRA",
  values: { lora: file, ...values },
  links: { pipeline: [from, "pipeline"] },
});
const save = (name) => ({
  kind: "SaveVideo",
  values: { filename_prefix: `video/${name}` },
  links: { video: ["decode", "video"] },
});
const picture = (title) => ({ kind: "LoadImage", title, values: { image: "example.png" } });
const SIZED = { image: ["encoded", "image"], width: ["encoded", "width"], height: ["encoded", "height"] };

const described = (title, model, text) => ({
  kind: "MarkdownNote",
  title: "Read me",
  values: { text: note(title, model, text) },
});

// Pixels in which a node has room for what a run puts on it: its text, and a preview. Both canvases were measured.
const ROOM = { load: 515, picture: 330, prompt: 435, encoded: 370, sample: 725, decode: 500, save: 460, recover: 260, lora: 240, small: 100 };
const NOTE = [{ key: "note", width: 325, height: 450 }];
// A node has a height in the lane, and may begin lower: Nodes 2.0 adds that of pictures to what it has.
const group = (name, width, ...nodes) => ({ group: name, nodes: nodes.map(([key, height, begins]) => ({ key, width, height, begins })) });
const LOADED = group("Load the model", 325, ["load", ROOM.load]);
const SAMPLE = group("Sample", 325, ["sample", ROOM.sample]);
const SEE = group("See", 325, ["save", ROOM.save], ["decode", ROOM.decode, 270]); // clear of the minimap

/** Note, model, pictures, prompt and encoded pictures, sample, result; author.mjs puts them into lanes. */
function columns({ pictures = [], encoded = [] }) {
  const shown = group("Show", 325, ...pictures.map((key) => [key, key === "components" ? ROOM.small : ROOM.picture]));
  const described = group("Describe", 325, ["prompt", ROOM.prompt], ...encoded.map((key) => [key, ROOM.encoded]));
  return [NOTE, LOADED, ...(pictures.length ? [shown] : []), described, SAMPLE, SEE];
}

/** Where nothing is sampled: note, model, saved latents, result. */
const RECOVERED = [NOTE, LOADED, group("Recover", 325, ["recover", ROOM.recover]), SEE];

/** With LoRAs: note, model, LoRAs, prompt, sample, result. */
const ADAPTED = [
  NOTE,
  LOADED,
  group("Adapt", 325, ["style", ROOM.lora], ["motion", ROOM.lora]),
  group("Describe", 325, ["prompt", ROOM.prompt]),
  SAMPLE,
  SEE,
];

function workflow(name, { title, model, text, nodes, placed, ...places }) {
  const all = { note: described(title, model, text), ...nodes, decode: nodes.decode ?? decode, save: save(name) };
  return { nodes: all, columns: placed ?? columns(places) };
}

const CAFE =
  "A woman with long brown hair smiles at another woman with blonde hair. The camera is a close-up on the first " +
  "woman's face. The lighting is warm and natural, as from the setting sun, and casts a soft glow. Real-life footage.";
const COAST =
  "The picture comes to life: a light wind moves through it, the camera glides slowly forward, and the light changes as " +
  "clouds pass. The movement is smooth and natural. Real-life footage, high quality.";
const CAT = "A cat walks on the grass in the morning sun, realistic, highly detailed, shallow depth of field.";
const DANCE = "The person turns around gracefully and dances, with clear movements, full of charm.";

const PICTURE_TIP = "The picture keeps its aspect ratio: *nearest bucket* picks the size, and the sampler uses it.";

/** A clip that begins with a picture, which is encoded at `size`. */
const onePicture = (model, prompt, sample, size) => ({
  pictures: ["image"],
  encoded: ["encoded"],
  nodes: { load: load(model), image: picture("First frame"), prompt, encoded: image(size), sample },
});
const SPECS = {
  anygpu_ltx_text_to_video: {
    title: "LTX-Video: text to video",
    model: "ltx",
    text: "The smallest and fastest of the five families. It works best with long, detailed prompts.",
    nodes: {
      load: load("LTX-Video"),
      prompt: prompt(CAFE, WITHOUT),
      sample: sample({ width: 704, height: 480, frames: 97 }),
    },
  },
  anygpu_ltx_image_to_video: {
    title: "LTX-Video: image to video",
    model: "ltx",
    text: `Your picture is the first frame. ${PICTURE_TIP}`,
    ...onePicture("LTX-Video", prompt(COAST, WITHOUT), sample({ frames: 97 }, SIZED), { width: 704, height: 480 }),
  },
  anygpu_ltx_first_last_frame: {
    title: "LTX-Video: first and last frame",
    model: "ltx_condition",
    text:
      "The video leads from one picture to another. Each *AnyGPU Encode Image* places a picture at its *frame* (-1 is " +
      "the last) and is chained to the one before through *previous*. Add more nodes for more key frames, or give one a" +
      " clip to extend it. " +
      "LTX-Video 0.9.5 and later were trained for this.",
    pictures: ["image", "last"],
    encoded: ["first", "encoded"],
    nodes: {
      load: load("LTX-Video-0.9.5"),
      image: picture("First frame"),
      last: picture("Last frame"),
      prompt: prompt(COAST, WITHOUT),
      first: { ...image({ width: 704, height: 480, frame: 0 }), title: "Encode first frame" },
      encoded: {
        ...image({ width: 704, height: 480, frame: -1 }, "last", { previous: ["first", "image"] }),
        title: "Encode last frame",
      },
      sample: sample({ frames: 97 }, SIZED),
    },
  },
  anygpu_ltx_recover_latents: {
    title: "LTX-Video: bring back what was sampled",
    model: "ltx",
    text:
      "The latents of every sampling are saved automatically after its last step. After a failed decode, a cancel or a" +
      " crash, choose the model they were made with, leave *kept* at newest or pick another, and queue: nothing is " +
      "sampled again. This works for all five families.",
    placed: RECOVERED,
    nodes: {
      load: load("LTX-Video"),
      recover: { kind: "AnyGPURecoverLatents", values: { kept: "newest" }, links: { pipeline: ["load", "pipeline"] } },
      decode: { kind: "AnyGPUDecode", links: { pipeline: ["load", "pipeline"], latent: ["recover", "latent"] } },
    },
  },
  anygpu_ltx_video_to_video: {
    title: "LTX-Video: video to video",
    model: "ltx",
    text:
      "Redraws one of your videos. *denoise* sets how much of it is new: 0.3 keeps nearly everything, 0.8 little more " +
      "than the layout. Frames, size and frame rate come from the video; if it has more than 160 frames, cut it first.",
    pictures: ["clip", "components"],
    encoded: ["encoded"],
    nodes: {
      load: load("LTX-Video"),
      clip: { kind: "LoadVideo", title: "Your video", values: { file: "example.mp4" } },
      components: { kind: "GetVideoComponents", links: { video: ["clip", "VIDEO"] } },
      prompt: prompt(CAFE, WITHOUT),
      encoded: {
        kind: "AnyGPUEncodeVideo",
        values: { width: 704, height: 480, fit: "crop", control_after_generate: "fixed" },
        links: { pipeline: ["load", "pipeline"], images: ["components", "images"] },
      },
      sample: sample(
        { width: 704, height: 480, frames: 0, denoise: 0.6 },
        { latent: ["encoded", "latent"], fps: ["components", "fps"] },
      ),
    },
  },
  anygpu_hunyuan_video_text_to_video: {
    title: "HunyuanVideo: text to video",
    model: "hunyuan_video",
    text: "13 billion parameters. *guidance* is built into the model and costs nothing; *cfg* above 1 doubles the time.",
    nodes: {
      load: load("HunyuanVideo"),
      prompt: prompt(CAT),
      sample: sample({ width: 848, height: 480, frames: 73 }),
    },
  },
  anygpu_hunyuan_video_lora: {
    title: "HunyuanVideo: two LoRAs",
    model: "hunyuan_video",
    text:
      "Two LoRAs, one after the other. Put your own into **ComfyUI/models/loras**, press **R** and choose them. The " +
      "second acts only in the *double* blocks: *blocks* takes terms such as **double 0-9, single**; empty means all. A " +
      "new *strength* costs nothing, and another file or another choice of *blocks* does not reload the model.",
    placed: ADAPTED,
    nodes: {
      load: load("HunyuanVideo"),
      prompt: prompt(CAT),
      style: { ...lora("none", { strength: 1 }), title: "First LoRA" },
      motion: {
        ...lora("none", { strength: 0.7, blocks: "double" }, "style"),
        title: "Second LoRA, double blocks alone",
      },
      sample: sample(
        { width: 848, height: 480, frames: 73 },
        { pipeline: ["motion", "pipeline"] },
      ),
    },
  },
  anygpu_hunyuan_video_image_to_video: {
    title: "HunyuanVideo: image to video",
    model: "hunyuan_video_i2v",
    text:
      `Your picture is the first frame, and the text encoder looks at it too. ${PICTURE_TIP} The 33-channel model ` +
      "(HunyuanVideo-I2V-33ch) works in the same workflow.",
    ...onePicture("HunyuanVideo-I2V", prompt(COAST, "", { image: ["image", "IMAGE"] }), sample({ frames: 73 }, SIZED), { width: 848, height: 480 }),
  },
  anygpu_hunyuan_video_15_text_to_video: {
    title: "HunyuanVideo 1.5: text to video",
    model: "hunyuan_video_15",
    text: "8 billion parameters. This is the 480p model; the 720p one works the same at 1280 x 720.",
    nodes: {
      load: load("HunyuanVideo-1.5-Diffusers-480p_t2v"),
      prompt: prompt(CAT),
      sample: sample({ width: 848, height: 480, frames: 121 }),
    },
  },
  anygpu_hunyuan_video_15_image_to_video: {
    title: "HunyuanVideo 1.5: image to video",
    model: "hunyuan_video_15_i2v",
    text: `Your picture is the first frame. ${PICTURE_TIP}`,
    ...onePicture("HunyuanVideo-1.5-Diffusers-480p_i2v", prompt(COAST), sample({ frames: 121 }, SIZED), { width: 848, height: 480 }),
  },
  anygpu_framepack_image_to_video: {
    title: "FramePack: image to video",
    model: "framepack",
    text:
      "Makes long videos in little memory, section by section, from the end to the start. Every finished section is " +
      "shown and saved. *section_prompts* takes one prompt per line for later sections.",
    ...onePicture("FramePackI2V_HY", prompt(DANCE), pack({ seed: 7, clip_seconds: 5, fps: 30, steps: 25, guidance: 10 })), // what the demo model draws well
  },
  anygpu_framepack_first_last_frame: {
    title: "FramePack: first and last frame",
    model: "framepack",
    text: "The video leads from one picture to another. *end_strength* on the sampler sets how strongly the last one " +
    "counts.",
    pictures: ["image", "last"],
    encoded: ["first", "encoded"],
    nodes: {
      load: load("FramePackI2V_HY"),
      image: picture("First frame"),
      last: picture("Last frame"),
      prompt: prompt(DANCE),
      first: { ...image({ frame: 0 }), title: "Encode first frame" },
      encoded: { ...image({ frame: -1 }, "last", { previous: ["first", "image"] }), title: "Encode last frame" },
      sample: pack({ clip_seconds: 5, fps: 30, steps: 25, guidance: 10 }),
    },
  },
  anygpu_framepack_f1_image_to_video: {
    title: "FramePack F1: image to video",
    model: "framepack_f1",
    text: "This FramePack samples from the start to the end, with more movement. It cannot use an end image.",
    ...onePicture("FramePack_F1_I2V_HY_20250503", prompt(DANCE), pack({ clip_seconds: 5, fps: 30, steps: 25, guidance: 10 })),
  },
  anygpu_mochi_text_to_video: {
    title: "Mochi 1: text to video",
    model: "mochi",
    text: "10 billion parameters, made for 848 x 480. Its schedule needs at least 50 steps.",
    nodes: {
      load: load("mochi-1-preview"),
      prompt: prompt(CAT),
      sample: sample({ width: 848, height: 480, frames: 85 }),
    },
  },
};

// Single files as core's own templates name them (comfyui-workflow-templates 0.11.44), FramePack's transformer as its
// wrapper for ComfyUI does and Mochi's as its repackager: input of AnyGPU Compose Pipeline, folder, address.
const COMFY = "https://huggingface.co/Comfy-Org";
const HUNYUAN_FILES = `${COMFY}/HunyuanVideo_repackaged/resolve/main/split_files`;
const HUNYUAN_15_FILES = `${COMFY}/HunyuanVideo_1.5_repackaged/resolve/main/split_files`;
const MOCHI_FILES = `${COMFY}/mochi_preview_repackaged/resolve/main/split_files`;
const FLUX_FILES = "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main";
const T5 = ["text_encoder", "text_encoders", `${FLUX_FILES}/t5xxl_fp16.safetensors`];
const OF_HUNYUAN = [
  ["vae", "vae", `${HUNYUAN_FILES}/vae/hunyuan_video_vae_bf16.safetensors`],
  ["text_encoder", "text_encoders", `${HUNYUAN_FILES}/text_encoders/llava_llama3_fp8_scaled.safetensors`],
  ["text_encoder_2", "text_encoders", `${FLUX_FILES}/clip_l.safetensors`],
];
const FILES = {
  ltx_text_to_video: [["transformer", "checkpoints", "https://huggingface.co/Lightricks/LTX-Video/resolve/main/ltx-video-2b-v0.9.5.safetensors"], T5],
  hunyuan_video_text_to_video: [
    ["transformer", "diffusion_models", `${HUNYUAN_FILES}/diffusion_models/hunyuan_video_t2v_720p_bf16.safetensors`],
    ...OF_HUNYUAN,
  ],
  hunyuan_video_15_text_to_video: [
    ["transformer", "diffusion_models", `${HUNYUAN_15_FILES}/diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors`],
    ["vae", "vae", `${HUNYUAN_15_FILES}/vae/hunyuanvideo15_vae_fp16.safetensors`],
    ["text_encoder", "text_encoders", `${HUNYUAN_15_FILES}/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors`],
    ["text_encoder_2", "text_encoders", `${HUNYUAN_15_FILES}/text_encoders/byt5_small_glyphxl_fp16.safetensors`],
  ],
  framepack_image_to_video: [
    ["transformer", "diffusion_models", "https://huggingface.co/Kijai/HunyuanVideo_comfy/resolve/main/FramePackI2V_HY_fp8_e4m3fn.safetensors"],
    ...OF_HUNYUAN,
    ["image_encoder", "clip_vision", `${COMFY}/sigclip_vision_384/resolve/main/sigclip_vision_patch14_384.safetensors`],
  ],
  mochi_text_to_video: [
    ["transformer", "diffusion_models", `${MOCHI_FILES}/diffusion_models/mochi_preview_fp8_scaled.safetensors`],
    ["vae", "vae", `${MOCHI_FILES}/vae/mochi_vae.safetensors`],
    T5,
  ],
};

const pageOf = (url) => url.replace("https://", "").split("/").slice(0, 3).join("/");

/** The same graph with AnyGPU Compose Pipeline, whose files core's dialog of missing models offers to download. */
function fromFiles(name, files) {
  const { title, nodes, ...spec } = SPECS[`anygpu_${name}`];
  const [, , ...rest] = columns(spec);
  const models = files.map(([, directory, url]) => ({ name: url.split("/").at(-1), url, directory }));
  const values = Object.fromEntries(files.map(([input], index) => [input, models[index].name]));
  const made = workflow(`anygpu_${name}_from_files`, {
    ...spec,
    title,
    placed: [[{ ...NOTE[0], height: 530 }], group("Load the model", 325, ["load", 435]), ...rest],
    nodes: { ...nodes, load: { kind: "AnyGPUComposePipeline", values, models } },
  });
  made.nodes.note.values.text = fileNote(`${title.split(":")[0]}, from files`, "", models, memory(spec.model === "ltx" ? "ltx_condition" : spec.model)); // 0.9.5
  return made;
}

const filesOf = (files) => files.map(([, directory, url]) => ({ name: url.split("/").at(-1), url, directory }));

/** A transformer and what goes with it, from single files; ``files`` as in FILES. */
function compose(title, files) {
  const models = filesOf(files);
  return { kind: "AnyGPUComposePipeline", title, models, values: Object.fromEntries(files.map(([input], index) => [input, models[index].name])) };
}

/** The text of a note that names each file. */
const fileNote = (title, text, models, size) =>
  [
    `# ${title}`,
    ...(text ? [text] : []),
    "## Get the files",
    "ComfyUI offers to download what is missing. By hand, then press **R**:",
    models.map(({ name, url, directory }) => `- **${name}** from ${pageOf(url)} to *ComfyUI/models/${directory}*`).join("\n"),
    size,
  ].join("\n\n");

/** AnyGPU Upscale Latents of what the node ``sample`` made, and AnyGPU Sample over them: a second pass of ``from``. */
function secondPass(from, upscaler, values) {
  const pipeline = [from, "pipeline"];
  const size = { width: 0, height: 0, frames: 0, steps: 0, cfg: 0, fps: 0, control_after_generate: "fixed", ...values };
  return {
    upscale: {
      kind: "AnyGPUUpscaleLatents",
      values: { upscaler: upscaler.name },
      models: [upscaler],
      links: { pipeline, latent: ["sample", "latent"] },
    },
    again: sample(size, { pipeline, latent: ["upscale", "latent"] }),
    decode: { kind: "AnyGPUDecode", links: { pipeline, latent: ["again", "latent"] } },
  };
}

/** LTX-Video 0.9.8 in both passes, as Lightricks' script makes 1216x704. */
function twoPasses() {
  const page = "https://huggingface.co/Lightricks/LTX-Video/resolve/main";
  const files = [["transformer", "checkpoints", `${page}/ltxv-2b-0.9.8-distilled.safetensors`], T5];
  const upscaler = ["upscaler", "latent_upscale_models", `${page}/ltxv-spatial-upscaler-0.9.8.safetensors`];
  const models = filesOf([...files, upscaler]);
  const made = workflow("anygpu_ltx_two_passes", {
    title: "LTX-Video 0.9.8: two passes",
    model: "ltx_condition",
    text: "",
    placed: [
      [{ ...NOTE[0], height: 530 }],
      group("Load the model", 325, ["load", 435]),
      group("Describe", 325, ["prompt", ROOM.prompt]),
      group("First pass, at two thirds", 325, ["sample", ROOM.sample]),
      group("Second pass, at twice that", 325, ["upscale", 180], ["again", ROOM.sample]),
      SEE,
    ],
    nodes: {
      load: compose("", files),
      prompt: prompt(CAFE, WITHOUT),
      sample: sample({ width: 800, height: 448, frames: 121 }),
      ...secondPass("load", models.at(-1), { width: 1216, height: 704 }),
    },
  });
  made.nodes.note.values.text = fileNote(
    "LTX-Video 0.9.8: two passes",
    "As Lightricks' script makes 1216x704: 7 steps at two thirds, the latents doubled, 3 steps at 1600x896, then the frames " +
      "resized. For another size, give the first pass two thirds of the second's, down to a multiple of 32. 13B " +
      "files work the same, dev in 27 and 13 steps.",
    models,
    memory("ltx_condition"),
  );
  return made;
}

/** HunyuanVideo 1.5 in both passes: 720p, then Tencent's super-resolution to 1080p. */
function superResolution() {
  const [first, vae, ...texts] = FILES.hunyuan_video_15_text_to_video;
  const second = ["transformer", "diffusion_models", `${HUNYUAN_15_FILES}/diffusion_models/hunyuanvideo1.5_1080p_sr_distilled_fp16.safetensors`];
  const upscaler = ["upscaler", "latent_upscale_models", `${HUNYUAN_15_FILES}/latent_upscale_models/hunyuanvideo15_latent_upsampler_1080p.safetensors`];
  const models = filesOf([first, vae, ...texts, second, upscaler]);
  const made = workflow("anygpu_hunyuan_video_15_super_resolution", {
    title: "HunyuanVideo 1.5: super-resolution",
    model: "hunyuan_video_15",
    text: "",
    placed: [
      [{ ...NOTE[0], height: 640 }],
      group("Load both models", 320, ["load", 435], ["super", 435]),
      group("Describe", 325, ["prompt", ROOM.prompt]),
      group("Sample 720p", 320, ["sample", ROOM.sample]),
      group("Sample 1080p", 320, ["upscale", 180], ["again", ROOM.sample]),
      SEE,
    ],
    nodes: {
      load: compose("720p", [first, vae, ...texts]),
      super: compose("Super-resolution to 1080p", [second, vae]),
      prompt: prompt(CAT),
      sample: sample({ width: 1280, height: 720, frames: 121 }),
      ...secondPass("super", models.at(-1)),
    },
  });
  made.nodes.note.values.text = fileNote(
    "HunyuanVideo 1.5: super-resolution",
    "Tencent's own second pass, which its script runs too: the latents of 720p are enlarged, and 8 steps make 1904x1072 of " +
      "them. For 720p from 480p choose the files with 720p in their names. With a picture, a second *AnyGPU Encode Image* " +
      "takes the enlarged latents as *latent*.",
    models,
    `${memory("hunyuan_video_15")} The second transformer is as large as the first.`,
  );
  return made;
}

export { CAFE, CAT, DANCE, LOADED, NOTE, ROOM, SEE, WITHOUT, group, described, image, load, picture, prompt };
export const WORKFLOWS = Object.fromEntries([
  ...Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]),
  ...Object.entries(FILES).map(([name, files]) => [`anygpu_${name}_from_files`, fromFiles(name, files)]),
  ["anygpu_ltx_two_passes", twoPasses()],
  ["anygpu_hunyuan_video_15_super_resolution", superResolution()],
]);
