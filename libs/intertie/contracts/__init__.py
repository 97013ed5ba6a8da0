"""Everything that is said between processes: one file per noun, the subject beside the shape.

Decoding is strict about types and tolerant of unknown fields. Fields are only ever added, with a default; a changed meaning is a new type.
`schemas/` is generated from this package (`ops/schemas`), and a test demands no difference.
"""
