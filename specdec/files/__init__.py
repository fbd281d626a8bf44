"""Reading and writing files and texts, and what a document must look like."""
