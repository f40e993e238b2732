"""Tables, plots, and the document to hand in."""

import matplotlib

matplotlib.rcdefaults()  # a user's matplotlibrc (usetex, say) must not change or break the plots
