class Placer: pass
