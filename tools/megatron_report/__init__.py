"""Report about one run, or several side by side.

reading.py    runs as their files tell them
content.py    sections with tables and plots, from runs
values.py     their names and values as a reader sees them
pages.py      the content as HTML, Markdown or JSON
picture.py    loss curves as an image file
"""
