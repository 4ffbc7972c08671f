"""Report about one run, or several side by side.

reading.py    runs as recorded in their files
content.py    sections with tables and plots of runs
values.py     names and values of tables as displayed
pages.py      the content as HTML, Markdown or JSON
picture.py    curves of loss and learning rate as an image file
"""
