// What each shipped workflow consists of: nodes with their values and links, in columns, and its note.

const LOAD = "AnyGPULoadPipeline";

/** GiB of bf16 weights: parameter counts times two bytes, from the models' configurations; nothing here was measured. */
const GIB = {
  ltx: { "text encoder (T5-XXL)": 8.9, transformer: 3.6, VAE: 0.8 },
  ltx_condition: { "text encoder (T5-XXL)": 8.9, transformer: 3.6, VAE: 0.9 },
  hunyuan_video: { "text encoder (Llama)": 14.0, "text encoder 2 (CLIP)": 0.2, transformer: 23.9, VAE: 0.5 },
  hunyuan_video_i2v: { "text encoder (Llava)": 15.6, "text encoder 2 (CLIP)": 0.2, transformer: 23.9, VAE: 0.5 },
  hunyuan_video_15: { "text encoder (Qwen2.5-VL)": 13.2, "text encoder 2 (ByT5)": 0.4, transformer: 15.5, VAE: 2.3 },
  hunyuan_video_15_i2v: {
    "text encoder (Qwen2.5-VL)": 13.2, "text encoder 2 (ByT5)": 0.4, "image encoder (SigLIP)": 0.8, transformer: 15.5, VAE: 2.3,
  },
  framepack: {
    "text encoder (Llama)": 14.0, "text encoder 2 (CLIP)": 0.2, "image encoder (SigLIP)": 0.8, transformer: 24.0, VAE: 0.5,
  },
  mochi: { "text encoder (T5-XXL)": 8.9, transformer: 18.7, VAE: 0.9 },
};

const PARTS = ["model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"];
const TWO_TEXTS = [...PARTS, "text_encoder_2", "tokenizer_2"];
const VISION = ["image_encoder", "feature_extractor"];

const DOWNLOADS = {
  ltx: [["Lightricks/LTX-Video", PARTS]],
  ltx_condition: [["Lightricks/LTX-Video-0.9.5", PARTS]],
  hunyuan_video: [["hunyuanvideo-community/HunyuanVideo", TWO_TEXTS]],
  hunyuan_video_i2v: [["hunyuanvideo-community/HunyuanVideo-I2V", [...TWO_TEXTS, "image_processor"]]],
  hunyuan_video_15: [["hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", [...TWO_TEXTS, "guider"]]],
  hunyuan_video_15_i2v: [
    ["hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", [...TWO_TEXTS, "guider", ...VISION]],
  ],
  framepack: [
    ["lllyasviel/FramePackI2V_HY", []],
    ["hunyuanvideo-community/HunyuanVideo", TWO_TEXTS.filter((part) => part !== "transformer")],
    ["lllyasviel/flux_redux_bfl", VISION],
  ],
  framepack_f1: [
    ["lllyasviel/FramePack_F1_I2V_HY_20250503", []],
    ["hunyuanvideo-community/HunyuanVideo", TWO_TEXTS.filter((part) => part !== "transformer")],
    ["lllyasviel/flux_redux_bfl", VISION],
  ],
  mochi: [["genmo/mochi-1-preview", PARTS]],
};

/** The text of a workflow's note. */
function note(title, model, text) {
  const sizes = GIB[model] ?? GIB.framepack;
  const largest = Math.max(...Object.values(sizes));
  const together = sizes.transformer + sizes.VAE;
  const encoder = Math.max(...Object.entries(sizes).filter(([part]) => /encoder/.test(part)).map(([, size]) => size));
  const rows = Object.entries(sizes).map(([part, size]) => `| ${part} | ${size.toFixed(1)} GiB |`);
  const places = DOWNLOADS[model].map(([page, parts]) => {
    const wanted = parts.length ? `\n  - only: ${parts.map((part) => `\`${part}\``).join(", ")}` : "";
    return `- huggingface.co/${page}\n  - into \`ComfyUI/models/diffusers/${page.split("/")[1]}\`${wanted}`;
  });
  return [
    `# ${title}`, text,
    "## Download", ...places,
    "", "Press **R** afterwards, then choose the folder in *AnyGPU Load Pipeline*.",
    "## Memory", "Weights in bf16, derived from the parameter counts, not measured:", "",
    "| part | weights |\n| --- | --- |", ...rows, "",
    `The text encoder has left before sampling starts. On top of the weights comes the working memory of the video: some ` +
      `GiB, more with size and length.`,
    `- *offload* **none**: about ${Math.max(together, encoder).toFixed(0)} GiB and that`,
    `- **model**: about ${largest.toFixed(0)} GiB and that`,
    `- **group**: a few GiB; the transformer is copied to the GPU again every step`,
    `- **sequential**: the least, and by far the slowest`,
    "", "**auto** takes the fastest that fits. The rest waits in the computer's own memory.",
  ].join("\n").replaceAll("\n## ", "\n\n## ");
}

const WITHOUT = "worst quality, inconsistent motion, blurry, jittery, distorted";

const load = (model, values = {}) => ({ kind: LOAD, values: { model, ...values } });
const prompt = (text, negative = "", links = {}) => ({
  kind: "AnyGPUEncodePrompt", values: { text, negative }, links: { pipeline: ["load", "pipeline"], ...links },
});
const image = (values = {}, from = "image", links = {}) => ({
  kind: "AnyGPUEncodeImage", values, links: { pipeline: ["load", "pipeline"], image: [from, "IMAGE"], ...links },
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
const save = (name) => ({
  kind: "SaveVideo", values: { filename_prefix: `video/${name}` }, links: { video: ["decode", "video"] },
});
const picture = (title) => ({ kind: "LoadImage", title, values: { image: "example.png" } });
const SIZED = { image: ["encoded", "image"], width: ["encoded", "width"], height: ["encoded", "height"] };

const described = (title, model, text) => ({ kind: "MarkdownNote", title: "Read me", values: { text: note(title, model, text) } });

/** Columns: note | model and pictures | prompt and encoded pictures | sample | result. */
function columns(nodes, { pictures = [], encoded = [] } = {}) {
  return [
    [{ key: "note", width: 460, height: 640 }],
    [{ key: "load", width: 360, below: 100 }, ...pictures.map((key) => ({ key, width: 360, height: 320 }))],
    [{ key: "prompt", width: 420, height: 300, below: 40 }, ...encoded.map((key) => ({ key, width: 420, below: 20 }))],
    [{ key: "sample", width: 340 }],
    [{ key: "decode", width: 460, below: 60 }, { key: "save", width: 460, height: 420 }],
  ];
}

function workflow(name, { title, model, text, nodes, ...layout }) {
  const all = { note: described(title, model, text), ...nodes, decode, save: save(name) };
  return { nodes: all, columns: columns(all, layout) };
}

const STILL_LIFE =
  "A woman with long brown hair smiles at another woman with blonde hair. The camera is a close-up on the first " +
  "woman's face. The lighting is warm and natural, as from the setting sun, casting a soft glow. Real-life footage.";

const SPECS = {
  ltx_text_to_video: {
    title: "LTX-Video: text to video", model: "ltx",
    text: "The smallest and fastest of the five families. It wants long, detailed prompts.",
    nodes: {
      load: load("LTX-Video"),
      prompt: prompt(STILL_LIFE, WITHOUT),
      sample: sample({ width: 704, height: 480, frames: 97, steps: 40, cfg: 3, fps: 25 }),
    },
  },
};

export const WORKFLOWS = Object.fromEntries(Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]));
