"""The control loop: observe, derive, plan, act, record. The only place where policy meets the world."""
