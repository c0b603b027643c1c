# not judged: ValueError: no data
raise ValueError('no data')
