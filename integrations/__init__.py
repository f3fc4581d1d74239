"""Other people's names for ring attention: one file per framework, imported only when asked for.

``import ringattn.integrations.transformers`` needs transformers, and so on; none is a dependency of this package.
"""
