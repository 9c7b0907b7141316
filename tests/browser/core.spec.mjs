// Workflows in which core's KSampler and VAE Decode run our models; made like those of workflows.spec.mjs.
import { CAFE, CAT, DANCE, NOTE, ROOM, WITHOUT, described, group, image, load, picture, prompt } from "./workflows.spec.mjs";

const CORE =
  "Core's own sampler runs the model, so core's schedulers, previews, *Skip Layer Guidance*, *Context Windows* and " +
  "LoRA nodes work with it: put them between MODEL and the sampler. AnyGPU only loads the model and encodes the text, " +
  "and the weights are in memory once. ";

const sampler = (values, links = {}) => ({
  kind: "KSampler",
  values: { seed: 42, control_after_generate: "randomize", sampler_name: "euler", scheduler: "simple", denoise: 1, ...values },
  links: {
    model: ["load", "MODEL"],
    positive: ["prompt", "positive"],
    negative: ["prompt", "negative"],
    latent_image: ["empty", "LATENT"],
    ...links,
  },
});
const empty = (kind, width, height, length, links = {}) => ({
  kind,
  values: { width, height, length, batch_size: 1 },
  links,
});
const guidance = (value, from) => ({ kind: "FluxGuidance", values: { guidance: value }, links: { conditioning: from } });
const decode = { kind: "VAEDecode", links: { samples: ["sample", "LATENT"], vae: ["load", "VAE"] } };
const video = (fps) => ({ kind: "CreateVideo", values: { fps }, links: { images: ["decode", "IMAGE"] } });
const save = (name) => ({
  kind: "SaveVideo",
  values: { filename_prefix: `video/${name}` },
  links: { video: ["video", "VIDEO"] },
});

const SPECS = {
  anygpu_ltx_core_ksampler: {
    title: "LTX-Video with core's KSampler",
    model: "ltx",
    text: `${CORE}*Conditioning LTXV* sets the frame rate.`,
    fps: 25,
    between: ["rate"],
    nodes: {
      load: load("LTX-Video"),
      prompt: prompt(CAFE, WITHOUT),
      rate: {
        kind: "LTXVConditioning",
        values: { frame_rate: 25 },
        links: { positive: ["prompt", "positive"], negative: ["prompt", "negative"] },
      },
      empty: empty("EmptyLTXVLatentVideo", 704, 480, 97),
      sample: sampler({ steps: 30, cfg: 3 }, { positive: ["rate", "positive"], negative: ["rate", "negative"] }),
    },
  },
  anygpu_hunyuan_video_core_ksampler: {
    title: "HunyuanVideo with core's KSampler",
    model: "hunyuan_video",
    text: `${CORE}*FluxGuidance* sets the guidance that is built into the model.`,
    fps: 24,
    between: ["guided"],
    nodes: {
      load: load("HunyuanVideo"),
      prompt: prompt(CAT),
      guided: guidance(6, ["prompt", "positive"]),
      empty: empty("EmptyHunyuanLatentVideo", 848, 480, 73),
      sample: sampler({ steps: 30, cfg: 1 }, { positive: ["guided", "CONDITIONING"] }),
    },
  },
  anygpu_hunyuan_video_15_core_ksampler: {
    title: "HunyuanVideo 1.5 with core's KSampler",
    model: "hunyuan_video_15",
    text: CORE,
    fps: 24,
    nodes: {
      load: load("HunyuanVideo-1.5-Diffusers-480p_t2v"),
      prompt: prompt(CAT),
      empty: empty("EmptyHunyuanVideo15Latent", 848, 480, 121),
      sample: sampler({ steps: 50, cfg: 6 }),
    },
  },
  anygpu_framepack_core_ksampler: {
    title: "FramePack with core's KSampler",
    model: "framepack",
    text:
      `${CORE}It samples one section of 33 frames from your picture; *AnyGPU Sample FramePack* makes long videos from ` +
      "many sections. *AnyGPU Image Conditioning* passes the picture to the sampler.",
    fps: 30,
    pictures: ["image"],
    between: ["pictured", "guided"],
    nodes: {
      load: load("FramePackI2V_HY"),
      image: picture("First frame"),
      prompt: prompt(DANCE),
      encoded: image(),
      pictured: {
        kind: "AnyGPUImageConditioning",
        links: {
          positive: ["prompt", "positive"],
          negative: ["prompt", "negative"],
          image: ["encoded", "image"],
        },
      },
      guided: guidance(10, ["pictured", "positive"]),
      empty: empty("EmptyHunyuanLatentVideo", 640, 608, 33, {
        width: ["encoded", "width"],
        height: ["encoded", "height"],
      }),
      sample: sampler({ steps: 25, cfg: 1 }, { positive: ["guided", "CONDITIONING"], negative: ["pictured", "negative"] }),
    },
  },
  anygpu_mochi_core_ksampler: {
    title: "Mochi 1 with core's KSampler",
    model: "mochi",
    text: `${CORE}The scheduler *linear_quadratic* is the one the model was made for.`,
    fps: 30,
    nodes: {
      load: load("mochi-1-preview"),
      prompt: prompt(CAT),
      empty: empty("EmptyMochiLatentVideo", 848, 480, 85),
      sample: sampler({ steps: 64, cfg: 4.5, scheduler: "linear_quadratic" }),
    },
  },
};

/** Note, model, picture, prompt and encoded picture, what stands between, sampler, result. */
function workflow(name, { title, model, text, fps, nodes, pictures = [], between = [] }) {
  return {
    nodes: { note: described(title, model, text), ...nodes, decode, video: video(fps), save: save(name) },
    columns: [
      [{ ...NOTE[0], height: 485 }],
      group("Load the model", 325, ["load", 480]),
      ...(pictures.length ? [group("Show", 325, ...pictures.map((key) => [key, ROOM.picture]))] : []),
      group("Describe", 325, ["prompt", ROOM.prompt], ...(nodes.encoded ? [["encoded", ROOM.encoded]] : [])),
      group("Prepare", 325, ...[...between, "empty"].map((key) => [key, key === "pictured" ? ROOM.small : 0])),
      group("Sample", 325, ["sample", 505]),
      group("See", 325, ["save", ROOM.save], ["video"], ["decode"]),
    ],
  };
}

export const CORE_WORKFLOWS = Object.fromEntries(
  Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]),
);
