"""What people see: pages, made from values that somebody else has read.

Everything here is pure: a page is a function of what it shows and of who looks. Templates hold the markup, `static/`
what the browser keeps: one style sheet, one script of ours, and uPlot for charts. Nothing is loaded from elsewhere,
nothing is built, and no page needs its script to be read or acted on.
"""
