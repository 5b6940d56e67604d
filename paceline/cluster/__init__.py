"""The machines: `facts` probes what is there, without touching CUDA."""
