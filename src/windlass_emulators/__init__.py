"""Clouds that run on loopback: what a vendor publishes about its API, with a bill, faults on request and real machines.

An emulator is a plain object without input or output of its own: `handle` takes one request and returns its answer,
and whatever takes time (boots, actions, bills) is a function of the clock it was given. So the same object serves HTTP
to the vendor's own clients (`serve`), and thousands of requests a second in virtual time to a test.

Nothing here knows Windlass: an emulator that shared our idea of the vendor would share our mistakes.
"""
