"""Readers of formats that others write, each of which becomes an `Index`; and which format a place is of."""
