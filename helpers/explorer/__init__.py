"""The sliders: what a split does, shown at once and measured at the press of a button.

Numbers, then pictures of them, then controls; a module imports only from those above it.

state       what the controls are set to, what-if changes of the machine among it
bench       the machines and models to explore, and the runs measured on them
moves       the state after one control has moved
split_map   throughput and fit at every split of the weights
view        everything that is shown of a state, in numbers and words
lettering   text that is drawn quickly
drawing     a figure that redraws only what a move changes
pictures    map_picture, frontier, overlap, roofline; and summary, the bars under them
controls    the widgets
sayings     what they say, as HTML
sliders     the widgets at work
tour        tables and pictures for where nothing moves
"""

from helpers.explorer.bench import Bench, open_bench
from helpers.explorer.sliders import Explorer
from helpers.explorer.tour import predicted_tok_s, start, tour, turning_point

__all__ = ["Bench", "Explorer", "open_bench", "predicted_tok_s", "start", "tour", "turning_point"]
