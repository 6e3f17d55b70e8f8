"""The paper's studies: every table and audit of it, with the controls that explain the result."""
