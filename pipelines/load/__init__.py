"""From files to a pipeline that is ready to run."""
