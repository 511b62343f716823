"""One module per command, each connecting the light half with the torch half. Importing them is light."""
