// What the texturing workflows consist of; made like those of workflows.spec.mjs.

/** GiB of fp16 weights: parameter counts times two bytes, from the models' configurations; nothing here was measured. */
const GIB = {
  paint: { "UNet over the views": 1.8, "UNet over the picture": 1.6, VAE: 0.2 },
  pbr: { "UNet over the views": 2.0, "UNet over the picture": 1.6, VAE: 0.2, "image encoder (DINOv2-giant)": 2.1 },
  delight: { "delight UNet": 1.6, "delight VAE": 0.2, "delight text encoder": 0.6 },
  adapter: { "UNet with the adapter": 6.4, "text encoders": 1.5, "VAE in fp32": 0.3 },
};

/** GiB of six views of 512 pixels: beside the weights, and with those of the largest part; counted, see docs/paint.md. */
const NEEDED = { paint: ["0.5", "2.3"], pbr: ["0.9", "3.0"], adapter: ["1.2", "7.6"] };
const VIEW = { adapter: 768 };

const PLACES = {
  "hunyuan3d-paint-v2-0": ["tencent/Hunyuan3D-2", "hunyuan3d-paint-v2-0"],
  "hunyuan3d-paint-v2-0-turbo": ["tencent/Hunyuan3D-2", "hunyuan3d-paint-v2-0-turbo"],
  "hunyuan3d-paintpbr-v2-1": ["tencent/Hunyuan3D-2.1", "hunyuan3d-paintpbr-v2-1"],
  "hunyuan3d-delight-v2-0": ["tencent/Hunyuan3D-2", "hunyuan3d-delight-v2-0"],
  "dinov2-giant": ["facebook/dinov2-giant", "the whole repository"],
  "sd_xl_base_1.0.safetensors": ["stabilityai/stable-diffusion-xl-base-1.0", "checkpoints"],
  "mvadapter_ig2mv_sdxl.safetensors": ["huanngzh/mv-adapter", "diffusion_models"],
  "RealESRGAN_x4plus.safetensors": ["Comfy-Org/Real-ESRGAN_repackaged", "upscale_models"],
};

const LICENCE =
  "The weights are Tencent's, under the Hunyuan 3D community licence: neither they nor what they make may be used in " +
  "the EU, the UK or South Korea. Read it first. AnyGPU neither ships nor downloads the weights.";

const ADAPTER_LICENCE =
  "The adapter is published under Apache-2.0, which excludes no country. SDXL has terms of its own, with limits on use: " +
  "read its card. AnyGPU neither ships nor downloads them.";

const CHOOSE =
  "It paints a ring until you choose your mesh (GLB, glTF, OBJ, PLY, STL) on *Load Mesh* and a picture of the object from the front. A mesh of " +
  "more than 100,000 faces wants core's *Decimate Mesh* before *Unwrap Mesh*.";

/** The text of a workflow's note; `shipped` where it begins with the mesh that ships. */
function note(title, text, models, kinds, { more = [], shipped = true }) {
  const sizes = kinds.flatMap((kind) => Object.entries(GIB[kind]).map(([part, size]) => `${part} ${size.toFixed(1)} GiB`));
  const [beside, most] = NEEDED[kinds[0]];
  const places = models.map((model) => {
    const [page, folder] = PLACES[model];
    if (model.endsWith(".safetensors")) return `- huggingface.co/${page}: ${model}\n  - into **ComfyUI/models/${folder}**`;
    return `- huggingface.co/${page}: ${folder} into **ComfyUI/models/diffusers/${model}**`;
  });
  return [
    `# ${title}`,
    text,
    ...(shipped ? ["", CHOOSE] : []),
    "## Get the models",
    ...places,
    ...more,
    "",
    "Press **R** afterwards.",
    "## Licence of the weights",
    kinds[0] === "adapter" ? ADAPTER_LICENCE : LICENCE,
    "## Memory",
    `Weights in fp16, counted, not measured: ${sizes.join(", ")}. Six views of ${VIEW[kinds[0]] ?? 512} pixels take ${beside} GiB on top; ` +
      `with *offload* model ${most} GiB in all. auto lets ComfyUI move the weights${kinds[0] === "adapter" ? "." : ": 8 GB are plenty."}`,
  ]
    .join("\n")
    .replaceAll("\n## ", "\n\n## ");
}

const load = (model, values = {}) => ({ kind: "AnyGPULoadPaintPipeline", values: { model, ...values } });
const FILES = ["sd_xl_base_1.0.safetensors", "mvadapter_ig2mv_sdxl.safetensors"];
const offered = (name) => ({
  name,
  url: `https://huggingface.co/${PLACES[name][0]}/resolve/main/${name}`,
  directory: PLACES[name][1],
});
const loadAdapter = {
  kind: "AnyGPULoadMVAdapter",
  values: { model: FILES[0], adapter: FILES[1] },
  models: FILES.map(offered),
};
const UPSCALER = "RealESRGAN_x4plus.safetensors";
const enlarge = (output, title) => ({
  kind: "ImageUpscaleWithModel",
  title,
  links: { upscale_model: ["upscaler", "UPSCALE_MODEL"], image: ["paint", output] },
});
const delighting = { ...load("hunyuan3d-delight-v2-0"), title: "AnyGPU Load Paint Pipeline: delight" };
const picture = { kind: "LoadImage", title: "The object from its front", values: { image: "example.png" } };
const mesh = { kind: "AnyGPULoadMesh", values: { mesh_file: "demo: ring" } };
const clean = (from, output = "mesh") => ({ kind: "AnyGPUCleanMesh", links: { mesh: [from, output] } });
const unwrap = (from) => ({ kind: "UnwrapMesh", values: { resolution: 2048, padding: 2 }, links: { mesh: [from, "mesh"] } });
const greedy = {
  kind: "AnyGPUPaintCameras",
  values: { choose: "greedy", max_views: 8 },
  links: { mesh: ["unwrap", "mesh"] },
};
const cutOut = { image: ["picture", "IMAGE"], mask: ["picture", "MASK"] };
const delight = {
  kind: "AnyGPUDelightImage",
  values: { seed: 42, control_after_generate: "fixed" },
  links: { pipeline: ["delighting", "pipeline"], ...cutOut },
};
const render = (links = {}) => ({
  kind: "AnyGPURenderViews",
  links: { mesh: ["unwrap", "mesh"], pipeline: ["load", "pipeline"], ...links },
});
const maps = {
  pipeline: ["load", "pipeline"],
  normals: ["render", "normals"],
  positions: ["render", "positions"],
  cameras: ["render", "cameras"],
};
const paint = (values, links) => ({
  kind: "AnyGPUPaintViews",
  values: { seed: 0, control_after_generate: "fixed", ...values },
  links: { ...maps, ...links },
});
const bake = (values = {}, links = {}) => ({
  kind: "AnyGPUBakeTexture",
  values: { texture_size: 2048, ...values },
  links: { mesh: ["unwrap", "mesh"], images: ["paint", "images"], cameras: ["render", "cameras"], ...links },
});

/** What every workflow ends in: the file, the turntable and the 3D preview of the node ``from``. */
function ending(name, from, before) {
  return {
    smooth: { kind: "MeshSmoothNormals", values: { crease_angle: 60 }, links: { mesh: [from, "mesh"] } },
    save: { kind: "SaveGLB", values: { filename_prefix: `3d/${name}` }, links: { mesh: ["smooth", "mesh"] } },
    turntable: {
      kind: "AnyGPURenderTurntable",
      values: { frames: 12, size: 512 },
      links: { mesh: [from, "mesh"], ...(before && { before: [before, "mesh"] }) },
    },
    pictures: { kind: "PreviewImage", title: "Turntable", links: { images: ["turntable", "images"] } },
    file: { kind: "MeshToFile3D", links: { mesh: ["smooth", "mesh"] } },
    look: { kind: "Preview3D", links: { model_file: ["file", "model_3d"] } },
  };
}

// Pixels in which a node has room for what a run puts on it; both canvases were measured.
const HEIGHTS = { picture: 330, mesh: 170, clean: 190, unwrap: 210, delight: 580, render: 460, first: 1040, paint: 1040, turntable: 480, pictures: 340, save: 400, look: 420, bake: 300, texture: 700, cameras: 420, load: 290, delighting: 290, shape: 128 };
const BEGINS = { delight: 260, render: 220, outline: 220, first: 460, paint: 460, turntable: 240, texture: 460 }; // Nodes 2.0 adds the pictures
const sized = (width, ...keys) =>
  keys.map((each) => {
    const [key, height = HEIGHTS[key]] = [each].flat(); // a pair where this workflow's node says more
    return { key, width, height, begins: BEGINS[key] ?? height };
  });
const loaders = (...keys) => ({ group: "Load", nodes: sized(315, ...keys) });
const step = (group, ...keys) => ({ group, nodes: sized(315, ...keys) });
const ENDING = [step("Turn", "turntable", "pictures"), step("Look and save", "look", "save", "smooth", "file")];
const NOTE = { key: "note", width: 315, height: 590 };

function workflow(name, { title, text, models, kinds, more, noted, nodes, columns, from, before }) {
  const described = { kind: "MarkdownNote", title: "Read me", values: { text: note(title, text, models, kinds, { more, shipped: "mesh" in nodes }) } };
  return { nodes: { note: described, ...nodes, ...ending(name, from, before) }, columns: [[{ ...NOTE, ...noted }], ...columns, ...ENDING], tallest: 1900 }; // its result stands at the top of a lane
}

const SHAPE = {
  shape: {
    kind: "ImageOnlyCheckpointLoader",
    values: { ckpt_name: "hunyuan_3d_v2.1.safetensors" },
    models: [
      {
        name: "hunyuan_3d_v2.1.safetensors",
        url: "https://huggingface.co/Comfy-Org/hunyuan3D_2.1_repackaged/resolve/main/hunyuan_3d_v2.1.safetensors",
        directory: "checkpoints",
      },
    ],
  },
  shifted: { kind: "ModelSamplingAuraFlow", values: { shift: 1 }, links: { model: ["shape", "MODEL"] } },
  seen: { kind: "CLIPVisionEncode", links: { clip_vision: ["shape", "CLIP_VISION"], image: ["picture", "IMAGE"] } },
  wanted: { kind: "Hunyuan3Dv2Conditioning", links: { clip_vision_output: ["seen", "CLIP_VISION_OUTPUT"] } },
  empty: { kind: "EmptyLatentHunyuan3Dv2", values: { resolution: 4096 } },
  sampled: {
    kind: "KSampler",
    values: { seed: 0, control_after_generate: "fixed", steps: 30, cfg: 5, sampler_name: "euler", scheduler: "normal" },
    links: {
      model: ["shifted", "MODEL"],
      positive: ["wanted", "positive"],
      negative: ["wanted", "negative"],
      latent_image: ["empty", "LATENT"],
    },
  },
  voxels: {
    kind: "VAEDecodeHunyuan3D",
    values: { num_chunks: 8000, octree_resolution: 256 },
    links: { samples: ["sampled", "LATENT"], vae: ["shape", "VAE"] },
  },
  surface: { kind: "VoxelToMesh", values: { algorithm: "surface net", threshold: 0.6 }, links: { voxel: ["voxels", "VOXEL"] } },
};

const texture = (values, links = {}) => ({
  kind: "AnyGPUTextureMesh",
  values: { ...values, seed: 0, control_after_generate: "fixed" },
  links: { mesh: ["clean", "mesh"], ...cutOut, pipeline: ["load", "pipeline"], ...links },
});
const SURFACE = { picture, mesh, clean: clean("mesh"), unwrap: unwrap("clean") };
const PBR = {
  load: load("hunyuan3d-paintpbr-v2-1", { image_encoder: "dinov2-giant" }),
  ...SURFACE,
  cameras: greedy,
  render: render({ cameras: ["cameras", "cameras"] }),
  paint: paint({}, cutOut),
};
const DELIGHTED = { models: ["hunyuan3d-paint-v2-0", "hunyuan3d-delight-v2-0"], kinds: ["paint", "delight"] };
const RENDERED = { load: load("hunyuan3d-paint-v2-0"), delighting, ...SURFACE, delight, render: render() };
const PREPARED = [loaders("load", "delighting", "picture"), step("Prepare", "mesh", "clean", "unwrap", "delight")];

const SPECS = {
  anygpu_paint_v2_0: {
    title: "Hunyuan3D paint v2-0: a texture, step by step",
    text: "Turns a mesh and a picture into a textured GLB: paints six views, 30 steps each, and bakes them.",
    ...DELIGHTED,
    nodes: {
      ...RENDERED,
      paint: paint({}, { image: ["delight", "image"] }),
      bake: bake(),
    },
    from: "bake",
    columns: [
      ...PREPARED,
      step("Paint", "render", "paint"),
      step("Bake", "bake"),
    ],
  },
  anygpu_paint_turbo: {
    title: "Hunyuan3D paint turbo: a texture in one node",
    text:
      "Textures a mesh in one node, with the model that needs only ten steps. If the folder has a .bin and a " +
      ".safetensors, the .bin is read, as in the published loader. The two come from different trainings; *weights* on " +
      "the load node chooses.",
    models: ["hunyuan3d-paint-v2-0-turbo", "hunyuan3d-delight-v2-0"],
    kinds: ["paint", "delight"],
    nodes: {
      load: load("hunyuan3d-paint-v2-0-turbo"),
      delighting,
      picture,
      mesh,
      clean: clean("mesh"),
      texture: texture({}, { delight: ["delighting", "pipeline"] }),
    },
    from: "texture",
    columns: [loaders("load", "delighting", "picture"), step("Texture", "mesh", "clean", "texture")],
  },
  anygpu_paint_pbr: {
    title: "Hunyuan3D paint PBR v2-1: albedo, metal and roughness",
    text:
      "The views are chosen for your mesh: six standard ones, plus those that show most of the unseen surface. This " +
      "model needs the picture as it is, shadows included.",
    models: ["hunyuan3d-paintpbr-v2-1", "dinov2-giant"],
    kinds: ["pbr"],
    nodes: {
      ...PBR,
      bake: bake({}, { metallic_roughness: ["paint", "metallic_roughness"] }),
    },
    from: "bake",
    columns: [loaders("load", "picture"), step("Prepare", "mesh", "clean", "unwrap", "cameras"), step("Paint", "render", "paint"), step("Bake", "bake")],
  },
  anygpu_paint_pbr_enlarged: {
    title: "Hunyuan3D paint PBR v2-1: views enlarged, as published",
    text:
      "Between painting and baking an upscale model makes each view four times larger, as Tencent does with RealESRGAN: " +
      "finer texels from views of 512 pixels. *Load Upscale Model* takes any model that core knows. RealESRGAN is " +
      "published under BSD-3-Clause.",
    models: ["hunyuan3d-paintpbr-v2-1", "dinov2-giant", UPSCALER],
    kinds: ["pbr"],
    noted: { height: 680 },
    nodes: {
      load: PBR.load,
      upscaler: { kind: "UpscaleModelLoader", values: { model_name: UPSCALER }, models: [offered(UPSCALER)] },
      ...PBR,
      colours: enlarge("images", "Enlarge the colours"),
      metal: enlarge("metallic_roughness", "Enlarge metal and roughness"),
      bake: bake({}, { images: ["colours", "IMAGE"], metallic_roughness: ["metal", "IMAGE"] }),
    },
    from: "bake",
    columns: [
      loaders("load", ["upscaler", 60], "picture"),
      step("Prepare", "mesh", "clean", "unwrap", "cameras"),
      step("Paint", "render", "paint"),
      step("Enlarge and bake", ["colours", 60], ["metal", 60], "bake"),
    ],
  },
  anygpu_paint_from_one_picture: {
    title: "From one picture to a textured mesh",
    text:
      "The shape comes from core's own Hunyuan3D nodes, the texture from Hunyuan3D paint v2-0. Such shapes have " +
      "hundreds of thousands of faces; *Decimate Mesh* reduces them to 40,000, so that unwrapping takes seconds.",
    ...DELIGHTED,
    more: [
      "- huggingface.co/Comfy-Org/hunyuan3D_2.1_repackaged: hunyuan_3d_v2.1.safetensors\n  - into **ComfyUI/models/checkpoints**",
    ],
    noted: { height: 565 },
    nodes: {
      ...SHAPE,
      picture,
      clean: clean("surface", "MESH"),
      fewer: { kind: "DecimateMesh", values: { target_face_count: 40000 }, links: { mesh: ["clean", "mesh"] } },
      unwrap: unwrap("fewer"),
      load: load("hunyuan3d-paint-v2-0"),
      delighting,
      delight,
      render: render(),
      paint: paint({}, { image: ["delight", "image"] }),
      bake: bake(),
    },
    from: "bake",
    columns: [
      loaders("picture", "shape", "load", "delighting"),
      step("Make the shape", "shifted", "seen", "wanted", "empty", "sampled"),
      step("Make the mesh", "voxels", "surface", "clean", "fewer", "unwrap"),
      step("Prepare", "delight", "render"),
      step("Paint and bake", "paint", "bake"),
    ],
  },
  anygpu_mv_adapter: {
    title: "MV-Adapter: a texture from your SDXL checkpoint",
    text:
      "Paints six views of 768 pixels with any SDXL checkpoint and the adapter ig2mv, 50 steps, and bakes them: colour with " +
      "its light, no metal or roughness. Cut the object out: a picture without transparency is used whole. Core's MODEL, " +
      "CLIP and VAE, with LoRAs, can be connected in place of the file.",
    models: FILES,
    kinds: ["adapter"],
    noted: { height: 640 },
    nodes: {
      load: loadAdapter,
      picture,
      mesh,
      clean: clean("mesh"),
      texture: texture({ view_size: 768 }),
    },
    from: "texture",
    columns: [loaders(["load", 560], "picture"), step("Texture", "mesh", "clean", ["texture", 900])],
  },
  anygpu_project_picture: {
    title: "Project Picture: your picture's own detail",
    text:
      "Paints and bakes a mesh, then puts the picture itself onto what it shows: lettering and fine lines that a network " +
      "paints anew. The turntable shows both, before and after. Your object must be whole in the picture, within 30 degrees " +
      "of the front, and cut out: for it, connect the mask of *Load Image* in place of *Invert Mask*, which cuts any picture " +
      "out by the ring's own outline. Where outlines do not fit, one line says so and nothing changes.",
    models: ["hunyuan3d-paint-v2-0"],
    kinds: ["paint"],
    noted: { height: 680 },
    nodes: {
      load: load("hunyuan3d-paint-v2-0"),
      picture,
      mesh,
      clean: clean("mesh"),
      unwrap: unwrap("clean"),
      ahead: { kind: "AnyGPUPaintCameras", values: { choose: "list", azimuths: "0", elevations: "0", weights: "1" } },
      outline: { ...render({ cameras: ["ahead", "cameras"] }), title: "The mesh from the front", values: { size: 512 } },
      cut: { kind: "InvertMask", links: { mask: ["outline", "mask"] } },
      render: render(),
      paint: paint({}, { image: ["picture", "IMAGE"], mask: ["cut", "MASK"] }),
      bake: bake(),
      project: {
        kind: "AnyGPUProjectPicture",
        links: { mesh: ["bake", "mesh"], front: ["picture", "IMAGE"], front_mask: ["cut", "MASK"] },
      },
    },
    from: "project",
    before: "bake",
    columns: [
      loaders("load", "picture"),
      step("Prepare", "mesh", "clean", "unwrap", "render"),
      step("The ring's outline", ["ahead", 420], ["outline", 680], ["cut", 60]),
      step("Paint", "paint"),
      step("Bake and project", "bake", ["project", 300]),
    ],
  },
  anygpu_paint_second_pass: {
    title: "Hunyuan3D paint v2-0: a second, larger pass",
    text:
      "Paints the views at 512 pixels, doubles the size of their latents, and paints them again at 1024 with *denoise*" +
      " 0.4: more detail on the same layout. The second pass needs four times the working memory of the first.",
    ...DELIGHTED,
    nodes: {
      ...RENDERED,
      first: { ...paint({}, { image: ["delight", "image"] }), title: "First pass" },
      larger: {
        kind: "LatentUpscaleBy",
        values: { upscale_method: "bicubic", scale_by: 2 },
        links: { samples: ["first", "latent"] },
      },
      paint: {
        ...paint({ view_size: 1024, denoise: 0.4 }, { image: ["delight", "image"], latent: ["larger", "LATENT"] }),
        title: "Second pass",
      },
      bake: bake(),
    },
    from: "bake",
    columns: [
      ...PREPARED,
      step("First pass", "render", "first", "larger"),
      step("Second pass", "paint"),
      step("Bake", "bake"),
    ],
  },
};

export const PAINT_WORKFLOWS = Object.fromEntries(
  Object.entries(SPECS).map(([name, spec]) => [name, workflow(name, spec)]),
);
