"""One module a command: they string the light half and the torch half together. Importing them is light."""
