"""What devices can use, compute and send.

- `device`: one of them; `table`: usual ones, from data sheets; `listing`: many, by name or from a file
- measuring it: `own_device` (what this rank has), `timing` (seconds of a call), `measuring` and `measuring_links` (what
  a rank measures), `fitting` (a line through the points), `measured_devices` (what all ranks together found)
"""

from shardwise.estimation.devices.device import Device, Rate
from shardwise.estimation.devices.listing import Devices, devices_of, kinds_of, machines, read_devices, write_devices

__all__ = ["Device", "Devices", "Rate", "devices_of", "kinds_of", "machines", "read_devices", "write_devices"]
