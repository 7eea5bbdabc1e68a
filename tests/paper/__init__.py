"""The paper's two large configurations (sections 7.1 and 7.2), reduced in width and depth only, train two steps."""
