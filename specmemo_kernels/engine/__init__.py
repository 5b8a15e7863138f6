"""The generation loop: sequences, verification, steps, overlap, scheduler, memory pressure."""
