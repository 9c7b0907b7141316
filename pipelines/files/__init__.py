"""Files on disk: model folders, single files, tensor names, LoRA keys, downloads."""
