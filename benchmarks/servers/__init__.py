import service as service  # before a program here loads NumPy
