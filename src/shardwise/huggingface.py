"""Folders of Hugging Face, written and read in pieces."""

from shardwise.interop.huggingface import load, load_pretrained, save_pretrained

__all__ = ["load", "load_pretrained", "save_pretrained"]
