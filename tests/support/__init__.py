"""What tests share: models and plans, ranks, references, drawn programs, and stand-ins for absent hardware."""
