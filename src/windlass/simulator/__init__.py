"""The world in virtual time: the real control loop among a store, clouds and workers that fail on a seed.

    loop.py           an event loop whose clock jumps to the next timer
    processes.py      what dies together: killed at any await, frozen, started again
    link.py           how calls travel: late, lost on their way, answered never; also after their caller died
    cloud.py          a Provider whose every fault can be scripted or drawn
    workers.py        what runs on its machines
    orchestrators.py  FleetTask and FleetCycle, killed and started again
    watch.py          what must hold, judged by the cloud's and the tasks' own books
    scenario.py       everything about a run that a seed decides
    world.py          all of it put together, and what happens in which order
    crashes.py        a crash before and after each call of a cycle

A store of another kind is tried in the same world by handing World a function that makes it. So is a provider: it is
given the cloud, whose `begin`, `end` and `billed` stand for the vendor's machines, so that the books stay the cloud's.
One seed is one story: `python -m windlass.simulator --seed 7` tells it again, line for line.
"""
