"""Readers of other libraries' formats. Each has `is_here` and `build_index`, which gives an `Index`.

- `dcp` and `dcp_writing`: folders of `torch.distributed.checkpoint`, read and written.
- `torchsnapshot`, `safetensors_folder`: the folders of these libraries.
- `torch_save`: files of `torch.save`, as a whole or within other files; `zip_directory` finds the entries of its zips.
- `safe_pickle`: parses pickles without running them.
- `assembly`, `nested`: from chunks to tensors, and from tensors to a state.
"""
