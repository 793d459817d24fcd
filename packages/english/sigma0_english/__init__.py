"""Data of smol-loop: `parts.safetensors`, what its core has learned, and its settings; `sigma0 get` reads them."""
