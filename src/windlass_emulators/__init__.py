"""Emulated clouds on loopback: the vendor's published API, a bill, fault injection and real local machines.

An emulator is a plain object: `handle` takes one request and returns its response, without waiting. Boots, actions and
billing advance with the clock that the emulator was given. The same object therefore serves HTTP to the vendor's own
clients (`serve`) and answers thousands of requests per second in virtual time in a test.

Emulators import nothing from Windlass: shared code would share its mistakes.
"""
