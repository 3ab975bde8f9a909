"""`evaluate.load("hfpretrain/bpb/metric")`: the loader wants a folder whose one file has the folder's name."""
