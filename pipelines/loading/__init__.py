"""From files to a pipeline: folders, single files, tensor names, LoRAs, downloads."""
