"""What each operator makes of its inputs, told by what they are made of: one file per kind of operator."""
