"""The sliders: what a split does, seen at once; measured at the press of a button.

bench  what there is to explore: machines, models, and what was measured on them
state  what is set, and what a move of one control makes of it
split_map  throughput and fit at every split of the weights
view   what a state shows: numbers and words, no picture
lettering  text that is drawn quickly
picture  the view as one picture
panel  the controls around it, in the notebook
tour  the same for where nothing moves
"""

from helpers.explorer.bench import Bench, open_bench
from helpers.explorer.panel import Explorer
from helpers.explorer.tour import start, tour

__all__ = ["Bench", "Explorer", "open_bench", "start", "tour"]
