"""The gated delta rule in chunks: KDA and GDN, forward and backward, and the maps ranks and segments exchange."""
