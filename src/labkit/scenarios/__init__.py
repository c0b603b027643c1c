"""Small models and data sets that chapters share with each other, or with their labs.

A chapter and its lab share most of them: `toy_captioner`, `padded_captioner`, `sum_and_average`,
`unwrapped_loss`, `sampled_completions`, `own_classes`, and `meshes`. Several
chapters share `rare_samples` and `toy_steps`. A chapter's notebook does not find the folder `labs`,
so these are here. What only one chapter uses is in a module beside that chapter.
"""
