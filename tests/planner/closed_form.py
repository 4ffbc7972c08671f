"""Parameters of a GPT by the formulas of the papers, independent of the code that builds them."""


def rank_parameters(model, layers, *, first, last, tensor_size, vocab_size):
    """Return the parameters of one tensor rank of a stage with `layers` layers.

    `vocab_size` is the padded one. Matrices and the biases of column-parallel products are divided;
    norms and the biases of row-parallel ones are not. `first` has the embedding and `last` the
    output, which is a copy of a tied embedding unless the stage is both.
    """
    h, bias = model.hidden_size, int(model.add_bias_linear)
    norm = h * (2 if model.normalization == "layernorm" else 1)
    # each of fewer key and value heads than ranks is on several
    groups = max(model.num_key_value_heads, tensor_size)
    qkv = (model.num_attention_heads + 2 * groups) * model.kv_channels
    inner = (2 if model.swiglu else 1) * model.ffn_hidden_size
    matrices = (
        h * qkv
        + model.num_attention_heads * model.kv_channels * h
        + h * inner
        + model.ffn_hidden_size * h
    )
    layer = (matrices + bias * (qkv + inner)) // tensor_size + bias * 2 * h + 2 * norm
    words = vocab_size * h // tensor_size
    learned = model.position_embedding_type == "learned_absolute"
    count = (
        layers * layer
        + norm * last
        + words * first
        + model.max_position_embeddings * h * (first and learned)
    )
    return count + words * (last and (model.untie_embeddings_and_output_weights or not first))
