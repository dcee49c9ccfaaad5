"""Pure layers that two or more methods share: the Layer algebra, attention, positions, language models, LoRA, sampling.

    from sakanajax.nn import attention, ffn, layer, positions, transformer

    mixer = attention.attention(64, heads=4, positions=positions.rope())
    model = transformer.lm(256, 64, layer.stack(transformer.block(64, mixer, ffn.glu(64, 256)), 4))
    params = model.init(jax.random.key(0))
    logits, _, aux = model.apply(params, tokens, (), layer.Ctx())
"""
