"""Data of users to token files of tandem: see README.md in this folder."""
