"""How a token gets its depth: exit rules, passes, K/V, sampling and detokenizing."""
