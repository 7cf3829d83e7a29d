"""The namesakes of ipyexperiments' helpers."""
